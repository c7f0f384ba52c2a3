"""The orthonormal outer step against NumPy float64, and inside `reconcile`."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import curvadion_jax as cd
from curvadion_jax import outer, synchronizers, triggers

pytestmark = pytest.mark.slow

SHAPES = {"tall": (6, 4), "wide": (3, 7), "square": (5, 5), "bias": (5,)}
# One step rounds factors to about 1e-7, times the condition number of D Q (up to 1e2
# for these), and Q goes on from step to step.
ATOL = 1e-4


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def in_numpy(drifts, qs, rate, momentum):
    """Updates for a list of pseudo-gradients, kernels as [fan_in, fan_out]."""
    trace, results = {name: 0.0 for name in SHAPES}, []
    for drift in drifts:
        update = {}
        for name, d in drift.items():
            trace[name] = d + momentum * trace[name]
            d = d + momentum * trace[name] if momentum else d
            if name != "bias":
                view = reference.rows_view(d)
                p, r = reference.dion_factors(view, qs[name])
                qs[name] = r / np.linalg.norm(r, axis=0)
                step = p @ qs[name].T
                step *= np.linalg.norm(d) / np.linalg.norm(step)
                d = reference.kernel_layout(step, d.shape)
            update[name] = -rate * d
        results.append(update)
    return results


def apply(tx, params, drifts):
    state, results = tx.init(params), []
    update = jax.jit(tx.update)
    for drift in drifts:
        updates, state = update(drift, state, params)
        results.append(updates)
    return results, state


def narrow(values):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)


@pytest.mark.parametrize(("rank", "momentum"), [(1.0, None), (1.0, 0.6), (2, None)])
def test_against_numpy(rank, momentum):
    tx = outer.orthonormal(0.7, momentum, rank=rank, orthonormalize=cd.householder_qr)
    params, drifts = narrow(tree(0)), [tree(seed) for seed in range(1, 6)]
    start = tx.init(params)[1].q
    qs = {name: np.asarray(q, np.float64) for name, q in start.items()}
    expected = in_numpy(drifts, qs, 0.7, momentum or 0.0)
    results, _ = apply(tx, params, narrow(drifts))
    for result, wanted in zip(results, expected, strict=True):
        chex.assert_trees_all_close(result, narrow(wanted), atol=ATOL)


def test_singular_values_become_alike_and_the_length_stays():
    tx = outer.orthonormal()
    params, drift = narrow(tree(0)), narrow(tree(1))
    results, _ = apply(tx, params, [drift] * 40)
    for name in ("tall", "wide", "square"):
        values = np.linalg.svd(results[-1][name], compute_uv=False)
        # 40 steps of power iteration leave (second / first singular value)^80.
        np.testing.assert_allclose(values, values[0], rtol=1e-2)
        norms = [np.linalg.norm(each[name]) for each in (drift, results[0])]
        np.testing.assert_allclose(*norms, rtol=1e-5)
    np.testing.assert_array_equal(results[-1]["bias"], -drift["bias"])


def test_a_stack_is_as_many_matrices():
    single = narrow({"w": np.random.default_rng(0).normal(size=(4, 6))})
    norm = {"scale": jnp.zeros((2, 4))}  # says that the other one is a stack
    stack = {"w": jnp.stack([single["w"], 3 * single["w"]]), **norm}
    numbers = lambda p: {  # noqa: E731
        name: cd.DimensionNumbers(-2, -1) if name == "w" else None for name in p
    }
    tx = outer.orthonormal(dimension_numbers=numbers)
    (result,), _ = apply(tx, stack, [stack])
    lengths = [np.linalg.norm(layer) for layer in result["w"]]
    np.testing.assert_allclose(lengths[1], 3 * lengths[0], rtol=1e-5)


def test_no_drift_gives_no_step():
    params = narrow(tree(0))
    zero = jax.tree.map(jnp.zeros_like, params)
    (result,), state = apply(outer.orthonormal(momentum=0.9), params, [zero])
    chex.assert_trees_all_equal(result, zero)
    chex.assert_tree_all_finite(state)


def test_half_precision_keeps_its_dtype():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree(0))
    (result,), state = apply(outer.orthonormal(), params, [params])
    assert {x.dtype for x in jax.tree.leaves(result)} == {jnp.dtype(jnp.bfloat16)}
    assert {q.dtype for q in state[1].q.values()} == {jnp.dtype(jnp.float32)}


def test_replicas_move_to_one_point_as_far_away_as_their_mean():
    params, gradients = helpers.make_params(), helpers.make_gradients(2, replicas=8)
    anchors = []
    for step in (outer.orthonormal(), None):
        tx = cd.adaptive_sync(
            optax.sgd(0.1),
            triggers.every_k(2),
            synchronizers.reconcile(step, momentum=False),
            helpers.AXIS,
        )
        _, state = helpers.last(helpers.run_mesh(tx, params, gradients))
        anchors.append(state.sync_state.anchor)
        helpers.assert_bitwise(
            anchors[-1], jax.tree.map(lambda x: np.stack([x[0]] * 8), anchors[-1])
        )
    for name in params:
        steps = [anchor[name][0] - params[name] for anchor in anchors]
        lengths = [np.linalg.norm(step) for step in steps]
        np.testing.assert_allclose(*lengths, rtol=1e-5)  # float32
        alike = np.allclose(*steps, atol=1e-5)
        assert alike == (name not in helpers.MATRICES)
