"""Optax around and inside of adaptive_sync: wrappers, dtypes, abstract values, scan."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS


def close(actual, expected):
    """Two float32 programs of the same mathematics on numbers of order 1: 1e-7."""
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=2e-6)


PARTS = [
    pytest.param(optax.sgd(0.1, 0.9), synchronizers.reconcile(), id="sgd"),
    pytest.param(cd.dion(0.1), synchronizers.average_factors(), id="dion"),
]


@pytest.mark.slow
def test_multi_steps_inside():
    # Three replicas, each accumulating two micro-batches between syncs.
    inner = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    gradients = helpers.make_gradients(2, 3)
    local = synchronizers.reconcile()
    tx = cd.adaptive_sync(inner, triggers.every_k(2), local, AXIS)
    first, (params, state) = helpers.run_mesh(tx, helpers.make_params(), gradients)
    assert helpers.decisions([first, (params, state)]) == [False, True]
    for name, start in helpers.make_params().items():
        helpers.assert_bitwise(
            first[0][name], np.broadcast_to(start, (3, *start.shape))
        )
        mean = np.mean([tree[name] for tree in gradients], axis=(0, 1))
        close(state.sync_state.anchor[name][1], start - 0.1 * mean)


@pytest.mark.parametrize(("inner", "synchronizer"), PARTS)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(
            lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx), id="chain"
        ),
        pytest.param(
            lambda tx: optax.partition(
                {"train": tx, "freeze": optax.set_to_zero()},
                {"tall": "train", "wide": "train", "bias": "train", "embed": "freeze"},
            ),
            id="partition",
        ),
    ],
)
def test_wrappers_around_trace_on_replicas(inner, synchronizer, wrap):
    """And chains inside."""
    inner = optax.chain(optax.add_noise(0.1, 0.5, key=3), inner)
    trigger = triggers.relative_momentum_change(0.1)
    tx = wrap(cd.adaptive_sync(inner, trigger, synchronizer, AXIS))
    helpers.trace(lambda p, o, g: tx.update(g, o, p), tx)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda g: extra_args["value"] * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    tx = cd.adaptive_sync(inner, triggers.every_k(2), synchronizers.reconcile())
    params = {"w": jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params, value=3.0)
    assert updates["w"].tolist() == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_muon", "curvadion"])
def test_the_default_is_made_of_public_parts(name):
    """Muon's or Dion's local steps, evenly spaced or by RMMC, Nesterov, two bits."""
    muon = optax.contrib.muon(
        0.1,
        beta=0.9,
        eps=1e-7,
        weight_decay=optax.constant_schedule(0.01),  # type: ignore[arg-type]
        adam_b2=0.95,
        muon_weight_dimension_numbers=cd.default_dimension_numbers(
            helpers.make_params()
        ),
    )
    dion = cd.dion(0.1, 1.0, 0.9, optax.constant_schedule(0.01))
    local, trigger = {
        "local_muon": (muon, triggers.evenly(0.5)),
        "curvadion": (dion, triggers.budget(0.5, ahead=1, behind=1)),
    }[name]
    parts = cd.adaptive_sync(
        local,
        trigger,
        synchronizers.reconcile(
            optax.sgd(1.0, 0.4, nesterov=True, accumulator_dtype="bfloat16"),
            compressor=cd.compressors.quantize(2),
            residual_dtype="bfloat16",
        ),
        AXIS,
    )
    whole = getattr(cd, name)(
        0.1,
        momentum=0.9,
        weight_decay=optax.constant_schedule(0.01),
        budget=0.5,
        axis_name=AXIS,
    )
    gradients = helpers.make_gradients(6, 2)
    ends = [
        helpers.last(helpers.run_vmap(tx, helpers.make_params(), gradients))
        for tx in (parts, whole)
    ]
    assert ends[0][1].metrics.syncs.tolist() == ends[1][1].metrics.syncs.tolist()
    assert ends[0][1].metrics.syncs[0] > 0
    close(ends[0][0], ends[1][0])
