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
INF = np.inf


def run(trigger, gradients, inner=None):
    """Metrics of every step of one replica; gradients is a tree of [steps, ...]."""
    inner = optax.sgd(0.1, momentum=0.5) if inner is None else inner
    tx = cd.adaptive_sync(inner, trigger, synchronizers.average_gradients())
    return run_optimizer(tx, gradients)


def run_optimizer(tx: Any, gradients):
    gradients = jax.tree.map(np.float32, gradients, is_leaf=lambda x: type(x) is list)
    params = jax.tree.map(lambda g: np.zeros(g.shape[1:], np.float32), gradients)

    def body(state, gradient):
        state = tx.update(gradient, state, params)[1]
        return state, state.metrics

    scan = jax.jit(lambda xs: lax.scan(body, tx.init(params), xs)[1])
    return jax.device_get(scan(gradients))


# The trace of sgd(momentum=1/2) is g + trace / 2: the sizes 4, 5, 5, 8, 2, of which
# the changes are inf on the first step, then 1/4, 0, 3/5, 3/4.
GRADIENTS = {"w": [[4.0, 0], [3, 0], [2.5, 0], [5.5, 0], [-2, 0]]}
CHANGES = [INF, 0.25, 0, 0.6, 0.75]


@pytest.mark.parametrize(
    ("threshold", "synced"),
    [
        pytest.param(0.65, [1, 0, 0, 0, 1], id="large"),
        pytest.param(0.5, [1, 0, 0, 1, 1], id="small"),
        pytest.param(0.25, [1, 0, 0, 1, 1], id="equal-does-not-fire"),
        pytest.param(np.nextafter(np.float32(0.25), 0), [1, 1, 0, 1, 1], id="below"),
        pytest.param(0, [1, 1, 0, 1, 1], id="zero"),
        pytest.param(INF, [0, 0, 0, 0, 0], id="never"),
    ],
)
def test_values_and_decisions(threshold, synced):
    metrics = run(change(threshold), GRADIENTS)
    np.testing.assert_allclose(metrics.value, CHANGES, rtol=RTOL)
    np.testing.assert_array_equal(metrics.threshold, np.float32(threshold))
    assert metrics.synced.tolist() == [bool(x) for x in synced]


@pytest.mark.slow
@pytest.mark.parametrize("error_feedback", [True, False])
def test_values_of_dion(error_feedback):
    # Gradients c I at full rank: M becomes (M + G) / 2. c = 4, .5, 1, 0 gives M + G =
    # 4, 2.5, 2.25, 1.125, as does the paper's m = m / 2 + g.
    gradients = {"w": np.array([4.0, 0.5, 1, 0])[:, None, None] * np.eye(2)}
    inner = cd.dion(0.1, 1.0, 0.5, error_feedback=error_feedback)
    metrics, values = run(change(0.4), gradients, inner), [INF, 0.375, 0.1, 0.5]
    np.testing.assert_allclose(metrics.value, values, atol=ATOL)
    assert metrics.synced.tolist() == [value > 0.4 for value in values]


def test_threshold_schedule_counts_steps():
    schedule = optax.piecewise_constant_schedule(0.7, {3: 0.1})  # 0.07 from step 3 on
    metrics = run(change(schedule), GRADIENTS)
    np.testing.assert_allclose(metrics.threshold, [0.7] * 3 + [0.07] * 2, rtol=RTOL)
    assert metrics.synced.tolist() == [True, False, False, True, True]


def test_the_layer_with_the_largest_change_is_named():
    # Sizes 4, 4, 4 and 4, 8, 8 and 4, 5, 2.5: changes are 0, 1, 1/4 and 0, 0, 1/2.
    gradients = {
        "a": [[4.0], [2], [2]],
        "b": {"bias": [[4.0], [6], [4]]},
        "c": [[4.0], [3], [0]],
    }
    metrics = run(change(0.4), gradients)
    assert metrics.layer.tolist() == [-1, 1, 2]
    np.testing.assert_allclose(metrics.value, [INF, 1, 0.5])


def test_from_zero_is_infinite_and_zero_to_zero_is_nothing():
    gradients = {"a": [[4.0], [2], [2]], "b": [[0.0], [0], [1]]}
    metrics = run(change(0.5), gradients)
    np.testing.assert_array_equal(metrics.value, [INF, 0, INF])
    assert metrics.layer.tolist() == [-1, -1, 1]


@pytest.mark.parametrize(
    "name", [pytest.param("mlp", id="stack"), pytest.param("scale", id="no-matrix")]
)
def test_every_matrix_of_a_stack_is_a_layer(name):
    # Matrix 0 stays at 100 while matrix 1 goes from 1 to 2. As one vector of 8
    # elements the change would be (sqrt(10004) - sqrt(10001)) / sqrt(10001).
    stack = np.zeros((2, 2, 2, 2))
    stack[0, :, 0, 0] = [100, 1]
    stack[1, :, 0, 0] = [50, 1.5]
    biases = np.zeros((2, 2, 2))  # tell that it is a stack
    metrics = run(change(0.5), {name: stack, f"{name}_bias": biases})
    whole = np.sqrt(10004) / np.sqrt(10001) - 1
    expected = 1 if name == "mlp" else whole
    np.testing.assert_allclose(metrics.value[1], expected, rtol=CANCELLED_RTOL)
    assert metrics.synced.tolist() == [True, name == "mlp"]


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
        "w": [[[0.05, 0], [0, 0]], [[0.05, 0], [0, 0]], [[0.0, 0], [0, 0]]],
    }
    metrics = run_optimizer(cd.presets.authors_code(0.1, 0.3, momentum=0.5), gradients)
    assert metrics.synced.tolist() == [False, True, False]
    changes = [0, 40 / 0.5, 0.1 / 2.475]
    np.testing.assert_allclose(metrics.value, changes, rtol=RTOL, atol=ATOL)
    assert metrics.layer.tolist() == [0, 0, 0]


@pytest.mark.parametrize("inner", [optax.sgd(0.1), heavy_ball()])
def test_no_momentum_is_an_error(inner):
    with pytest.raises(ValueError, match="keeps no momentum"):
        run(change(0.1), GRADIENTS, inner)


def test_a_gradient_that_is_not_finite_requests_nothing():
    """Nor does what comes after it, of a momentum that has decayed once."""
    gradients = {"w": [np.eye(3)] * 30}
    gradients["w"][20] = np.full((3, 3), np.nan)
    for inner in (cd.dion(0.01, momentum=0.8), optax.sgd(0.1, 0.8)):
        metrics = run(change(0.1), gradients, inner)
        assert metrics.nonfinite[-1] == 1
        assert metrics.value[20] == 0
        assert not metrics.synced[15:].any()


def test_the_first_step_synchronises_whatever_its_gradients_are():
    metrics = run(change(0.1), {"a": [[np.nan], [4.0], [4]]})
    assert metrics.synced.tolist()[0]
    assert metrics.value[0] == INF
