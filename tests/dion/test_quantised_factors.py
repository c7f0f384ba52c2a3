"""Dion's factors in few bits, against NumPy."""

import helpers
import numpy as np
import optax
import pytest
import reference as ref

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

pytestmark = pytest.mark.slow

MU, RATE, BLOCK, REPLICAS = 0.9, 0.1, 4, 3
# float32 sums, products and factorisations of some dozens of numbers of order one.
# Measured: 2e-6; a step of the roughest codes here is 0.1 and more.
ATOL = 2e-5


def optimizer(bits, rank=2):
    return cd.adaptive_sync(
        cd.dion(RATE, rank, MU, other_optimizer=optax.sgd(RATE)),
        triggers.always(),
        synchronizers.average_factors(compressors.quantize(bits, BLOCK)),
        helpers.AXIS,
    )


def encoded(flat, bits):
    """What the codes of a float64 array of whole blocks stand for."""
    levels, blocks = 2 ** (bits - 1) - 1, flat.reshape(-1, BLOCK)
    step = np.abs(blocks).max(1, keepdims=True) / levels
    step = np.where(step == 0, 1, step)
    return (np.round(blocks / step) * step).reshape(flat.shape)


def quantised_mean(arrays, bits):
    """The mean in two stages, and a list of what each replica put in."""
    number, size = len(arrays), arrays[0].size
    pad = -size % (number * BLOCK)
    sent = [encoded(np.pad(a.reshape(-1), (0, pad)), bits) for a in arrays]
    mean = np.mean(sent, axis=0)
    for k, part in enumerate(np.split(np.arange(size + pad), number)):
        rounded = encoded(mean[part], bits)
        sent[k][part] -= number * (mean[part] - rounded)
        mean[part] = rounded
    shaped = [x[:size].reshape(arrays[0].shape) for x in (mean, *sent)]
    return shaped[0], shaped[1:]


def reference_step(gradients, momenta, q, bits, whole):
    """Direction, momenta of the replicas and Q, after a step with quantised means."""
    shape = gradients[0].shape
    bs = [m + g for m, g in zip(momenta, gradients, strict=True)]
    kept = [np.zeros(shape)] * len(bs)
    if whole:
        mean, sent = quantised_mean(bs, bits)
        kept = [b - s for b, s in zip(bs, sent, strict=True)]
        bs = [mean] * len(bs)
    views = [ref.rows_view(b) for b in bs]
    products = [b @ q for b in views]
    p = ref.orthonormal_factor(
        products[0] if whole else quantised_mean(products, bits)[0]
    )
    rs = [b.T @ p for b in views]
    r, sent = (rs[0], rs) if whole else quantised_mean(rs, bits)
    momenta = [
        b - (1 - MU) * ref.kernel_layout(p @ s.T, shape) + k
        for b, s, k in zip(bs, sent, kept, strict=True)
    ]
    q = ref.column_normalize(r, q)
    return ref.scaled_direction(p, q, shape), momenta, q


@pytest.mark.parametrize(
    ("rank", "bits"),
    [pytest.param(2, 4, id="factors-4"), pytest.param(1.0, 8, id="whole-8")],
)
def test_steps_are_the_references(rank, bits):
    gradients = helpers.make_gradients(3, REPLICAS)
    for name in helpers.MATRICES:
        # One at a time: who rounds the mean of a block depends on all arrays sent.
        tx, given = optimizer(bits, rank), helpers.make_params()[name]
        start = helpers.dion_state(tx.init({name: given}))
        own = [{name: tree[name]} for tree in gradients]
        trajectory = list(helpers.run_vmap(tx, {name: given}, own))
        momenta = [np.zeros(helpers.SHAPES[name])] * REPLICAS
        q = np.asarray(start.q[name], float)
        params = np.asarray(given, float)
        for tree, (actual, opt_state) in zip(gradients, trajectory, strict=True):
            direction, momenta, q = reference_step(
                list(tree[name].astype(float)), momenta, q, bits, whole=rank == 1.0
            )
            params = params - RATE * direction
            state = helpers.dion_state(opt_state)
            for replica in range(REPLICAS):
                close(state.momentum[name][replica], momenta[replica])
                close(state.q[name][replica], q)
                close(actual[name][replica], params)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL)
