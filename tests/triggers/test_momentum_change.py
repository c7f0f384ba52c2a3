"""The relative momentum change: its values by hand, and what it looks at."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

change = triggers.relative_momentum_change
# Dion's momentum of a diagonal matrix goes through an orthonormalisation in float32.
ATOL = 1e-6
# A few float32 roundings.
RTOL = 1e-6
# The difference of two norms that agree to 1.5e-4 has four digits left in float32.
CANCELLED_RTOL = 1e-2
# In place of infinity.
LARGEST = np.finfo(np.float32).max


def run(trigger, gradients, inner=None):
    """Counters of every step of one replica; gradients is a tree of [steps, ...]."""
    inner = optax.sgd(0.1, momentum=0.5) if inner is None else inner
    tx = cd.adaptive_sync(inner, trigger, synchronizers.average_gradients())
    return run_optimizer(tx, gradients)


def run_optimizer(tx: Any, gradients):
    as_array = lambda x: x if isinstance(x, jax.Array) else np.float32(x)
    gradients = jax.tree.map(as_array, gradients, is_leaf=lambda x: type(x) is list)
    params = jax.tree.map(lambda g: np.zeros(g.shape[1:], g.dtype), gradients)

    def body(state, gradient):
        state = tx.update(gradient, state, params)[1]
        return state, state.counters

    scan = jax.jit(lambda xs: lax.scan(body, tx.init(params), xs)[1])
    return jax.device_get(scan(gradients))


def synced(counters):
    """Whether each step synchronised."""
    return counters.since == 0


# The trace of sgd(momentum=1/2) is g + trace / 2: the sizes 4, 5, 5, 8, 2, of which
# the changes are the largest float on the first step, then 1/4, 0, 3/5, 3/4.
GRADIENTS = {"w": [[4.0, 0], [3, 0], [2.5, 0], [5.5, 0], [-2, 0]]}
CHANGES = [LARGEST, 0.25, 0, 0.6, 0.75]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        pytest.param(0.65, [1, 0, 0, 0, 1], id="large"),
        pytest.param(0.5, [1, 0, 0, 1, 1], id="small"),
        pytest.param(0.25, [1, 0, 0, 1, 1], id="equal-does-not-fire"),
        pytest.param(np.nextafter(np.float32(0.25), 0), [1, 1, 0, 1, 1], id="below"),
        pytest.param(0, [1, 1, 0, 1, 1], id="zero"),
        pytest.param(np.inf, [0, 0, 0, 0, 0], id="never"),
    ],
)
def test_values_and_decisions(threshold, expected):
    found = run(change(threshold), GRADIENTS)
    np.testing.assert_allclose(found.value, CHANGES, rtol=RTOL)
    np.testing.assert_array_equal(found.threshold, np.float32(threshold))
    assert synced(found).tolist() == [bool(x) for x in expected]


@pytest.mark.slow
@pytest.mark.parametrize("error_feedback", [True, False])
def test_values_of_dion(error_feedback):
    # Gradients c I at full rank: M becomes (M + G) / 2. c = 4, .5, 1, 0 gives M + G =
    # 4, 2.5, 2.25, 1.125, as does the paper's m = m / 2 + g.
    gradients = {"kernel": np.array([4.0, 0.5, 1, 0])[:, None, None] * np.eye(2)}
    inner = cd.dion(0.1, rank=1.0, momentum=0.5, error_feedback=error_feedback)
    found, values = run(change(0.4), gradients, inner), [LARGEST, 0.375, 0.1, 0.5]
    np.testing.assert_allclose(found.value, values, atol=ATOL)
    assert synced(found).tolist() == [value > 0.4 for value in values]


def test_threshold_schedule_counts_steps():
    schedule = optax.piecewise_constant_schedule(0.7, {3: 0.1})  # 0.07 from step 3 on
    found = run(change(schedule), GRADIENTS)
    np.testing.assert_allclose(found.threshold, [0.7] * 3 + [0.07] * 2, rtol=RTOL)
    assert synced(found).tolist() == [True, False, False, True, True]


def test_the_layer_with_the_largest_change_is_named():
    # Sizes 4, 4, 4 and 4, 8, 8 and 4, 5, 2.5: changes are 0, 1, 1/4 and 0, 0, 1/2.
    gradients = {
        "a": [[4.0], [2], [2]],
        "b": {"bias": [[4.0], [6], [4]]},
        "c": [[4.0], [3], [0]],
    }
    found = run(change(0.4), gradients)
    assert found.layer.tolist() == [0, 1, 2]
    np.testing.assert_allclose(found.value, [LARGEST, 1, 0.5])


def test_from_zero_is_the_largest_float_and_zero_to_zero_is_nothing():
    gradients = {"a": [[4.0], [2], [2]], "b": [[0.0], [0], [1]]}
    found = run(change(0.5), gradients)
    np.testing.assert_array_equal(found.value, [LARGEST, 0, LARGEST])
    assert found.layer.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "numbers", [cd.DimensionNumbers(1, 2), None], ids=["stack", "no-matrix"]
)
def test_every_matrix_of_a_stack_is_a_layer(numbers):
    # Matrix 0 stays at 100 while matrix 1 goes from 1 to 2. As one vector of 8
    # elements the change would be (sqrt(10004) - sqrt(10001)) / sqrt(10001).
    stack = np.zeros((2, 2, 2, 2))
    stack[0, :, 0, 0] = [100, 1]
    stack[1, :, 0, 0] = [50, 1.5]
    found = run(change(0.5, {"mlp": numbers}), {"mlp": stack})
    whole = np.sqrt(10004) / np.sqrt(10001) - 1
    expected = 1 if numbers else whole
    np.testing.assert_allclose(found.value[1], expected, rtol=CANCELLED_RTOL)
    assert synced(found).tolist() == [True, numbers is not None]


def test_norms_of_momenta_of_few_bits_are_taken_in_float32():
    # The trace is 1, then 1 for 256 elements and 1/2 for 44.
    second = np.where(np.arange(300) < 256, 0.5, 0)
    gradients = {"w": jnp.asarray([np.ones(300), second], jnp.bfloat16)}
    found = run(change(0.5), gradients)
    np.testing.assert_allclose(found.value[1], 1 - np.sqrt(267 / 300), rtol=1e-5)


def heavy_ball():
    """An optimizer that keeps its momentum where nobody looks."""

    def update(updates, state, params=None):
        del params
        state = jax.tree.map(lambda v, g: v / 2 + g, state, {"velocity": updates})
        return state["velocity"], state

    init = lambda params: {"velocity": jax.tree.map(jnp.zeros_like, params)}
    return optax.GradientTransformation(init, update)


@pytest.mark.slow
def test_the_authors_rule_looks_at_every_momentum_but_not_at_the_first_step():
    # Lion keeps M = 0.95 M + 0.05 G of the bias: 0.5, then 0.475 + 2 = 2.475. What is
    # compared is M + G: 0.5 + 40, then 2.475 + 0.1. The matrix stays below the floor.
    gradients = {
        "bias": [[10.0, 0], [40, 0], [0.1, 0]],
        "kernel": [[[0.05, 0], [0, 0]], [[0.05, 0], [0, 0]], [[0.0, 0], [0, 0]]],
    }
    found = run_optimizer(
        cd.presets.authors_code(0.1, threshold=0.3, momentum=0.5), gradients
    )
    assert synced(found).tolist() == [False, True, False]
    changes = [0, 40 / 0.5, 0.1 / 2.475]
    np.testing.assert_allclose(found.value, changes, rtol=RTOL, atol=ATOL)
    assert found.layer.tolist() == [0, 0, 0]


# At the first step Lion's momentum of the bias is 1/20 of it; what the second compares
# is M + G with M, of which norms below 0.1 count as no change.
@pytest.mark.parametrize(
    ("first", "value"),
    [
        pytest.param(2.0, 1.0, id="at the floor"),
        pytest.param(2.001, 0.2 / 0.10005 - 1, id="above"),
        pytest.param(1.99, 0.0, id="below"),
        pytest.param(0.5, 0.0, id="far below"),
    ],
)
def test_the_authors_floor_of_a_tenth(first, value):
    matrix = np.zeros((2, 2, 2))
    momentum = np.float32(0.05) * np.float32(first)
    gradients = {"bias": [[first, 0.0], [0.2 - momentum, 0.0]], "kernel": matrix}
    tx = cd.presets.authors_code(0.1, threshold=0.3, momentum=0.5)
    found = run_optimizer(tx, gradients)
    np.testing.assert_allclose(found.value[1], value, rtol=1e-5)
    assert synced(found).tolist() == [False, value > 0]


def test_the_authors_norms_are_taken_in_float32():
    """Of 64 elements of 100; their squares overflow float16."""
    tx = cd.presets.authors_code(0.1, threshold=0.3, momentum=0.5)
    half, single = (
        run_optimizer(tx, {"kernel": jnp.full((4, 8, 8), 100, dtype)})
        for dtype in (jnp.float16, jnp.float32)
    )
    np.testing.assert_allclose(half.value, single.value, rtol=1e-2)
    np.testing.assert_array_equal(synced(half), synced(single))


@pytest.mark.parametrize("inner", [optax.sgd(0.1), heavy_ball()])
def test_no_momentum_is_an_error(inner):
    with pytest.raises(ValueError, match="keeps no momentum"):
        run(change(0.1), GRADIENTS, inner)


def test_a_gradient_that_is_not_finite_requests_nothing():
    """Nor does what comes after it, of a momentum that has decayed once."""
    gradients = {"kernel": [np.eye(3)] * 30}
    gradients["kernel"][20] = np.full((3, 3), np.nan)
    for inner in (
        cd.dion(0.01, momentum=0.8),
        optax.sgd(0.1, 0.8),
        optax.sgd(0.1, momentum=0.0),  # whose momentum is zero then
    ):
        found = run(change(0.1), gradients, inner)
        assert found.nonfinite[-1] == 1
        assert found.value[20] == 0
        assert not synced(found)[15:].any()


def test_the_first_step_alone_synchronises_whatever_its_gradients_are():
    found = run(change(0.1), {"a": [[np.nan], [4.0], [4]]}, optax.sgd(0.1, 0.0))
    assert synced(found).tolist() == [True, False, False]
    assert found.value[0] == LARGEST


@pytest.mark.parametrize("spoilt", ["trace", "mu"])
@pytest.mark.parametrize(
    "synchronizer", [synchronizers.reconcile(), synchronizers.average_gradients()]
)
def test_a_state_that_is_not_finite_requests_one_sync(spoilt, synchronizer):
    """All of it begins again there, and has no predecessor on the next step."""
    inner = optax.chain(optax.scale_by_adam(), optax.trace(0.5), optax.scale(-0.1))
    tx = cd.adaptive_sync(inner, change(1.2), synchronizer)
    params, update = {"w": jnp.ones(3)}, jax.jit(tx.update)
    state = tx.init(params)
    syncs = []
    for step in range(9):
        if step == 6:
            bad = {spoilt: {"w": jnp.full(3, jnp.nan)}}
            inner_state = optax.tree.set(state.rows.inner_state, **bad)
            state = state._replace(rows=state.rows._replace(inner_state=inner_state))
        state = update(params, state, params)[1]
        syncs.append(int(state.counters.syncs))
    assert syncs == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert state.counters.excluded == 1


def test_replicas_without_a_layer_synchronise_on_every_step():
    """Dion trains no vectors, so nothing else would ever bring them together."""
    tx = cd.curvadion(0.1, threshold=0.3)
    params = {"bias": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
    assert state.counters.syncs == 3
