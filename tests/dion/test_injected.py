"""`optax.inject_hyperparams` takes every optimizer; ranks and budgets are static."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd

# The numbers of an optimizer are arrays of its state, and no constants of the program,
# which then may round otherwise: five steps of parameters of order 1. Measured: 2.4e-7.
ATOL = 1e-6
STEPS, RATE = 5, 0.01
MATRICES = {name: helpers.SHAPES[name] for name in helpers.MATRICES}
ONE_REPLICA = [
    pytest.param(cd.scale_by_dion, (), {}, id="scale_by_dion"),
    pytest.param(cd.dion, (RATE,), {}, id="dion"),
    pytest.param(cd.curvadion, (RATE,), {}, id="curvadion"),
    pytest.param(cd.local_muon, (RATE,), {}, id="local_muon"),
]
# Two syncs and more in so few steps.
REPLICAS = [
    pytest.param(
        cd.curvadion, {"budget": 0.6}, id="curvadion-budget", marks=pytest.mark.slow
    ),
    pytest.param(
        cd.curvadion,
        {"threshold": 0.4},
        id="curvadion-threshold",
        marks=pytest.mark.slow,
    ),
    pytest.param(cd.local_muon, {"budget": 0.5}, id="local_muon-budget"),
]


def problem(build, replicas):
    """Parameters and gradients; `scale_by_dion` takes matrices alone."""
    names = MATRICES if build is cd.scale_by_dion else helpers.SHAPES
    gradients = helpers.make_gradients(STEPS, replicas)
    return (
        {name: helpers.make_params()[name] for name in names},
        [{name: tree[name] for name in names} for tree in gradients],
    )


def close(trajectory, expected):
    for (params, _), (others, _) in zip(trajectory, expected, strict=True):
        for name, value in others.items():
            np.testing.assert_allclose(params[name], value, rtol=0, atol=ATOL)


def test_a_scheduled_momentum_is_no_coarser_than_a_number():
    """0.999 is 1 in bfloat16, in which nothing would move."""
    params = {"kernel": jnp.ones((8, 8), jnp.bfloat16)}
    tx = cd.local_muon(RATE, momentum=lambda step: 0.999)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, new = update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        assert np.any(np.asarray(updates["kernel"], np.float32))
        state = new


@pytest.mark.parametrize(("build", "arguments", "options"), ONE_REPLICA)
def test_the_updates_are_those_without_it(build: Any, arguments, options):
    params, gradients = problem(build, 1)
    gradients = [jax.tree.map(lambda g: g[0], tree) for tree in gradients]
    injected = optax.inject_hyperparams(build)(*arguments, **options)
    plain = build(*arguments, **options)
    runs = [list(helpers.run_alone(tx, params, gradients)) for tx in (injected, plain)]
    close(*runs)
    for name in MATRICES:
        assert np.abs(runs[0][-1][0][name] - params[name]).max() > RATE / 2


@pytest.mark.parametrize(("build", "options"), REPLICAS)
def test_replicas_take_the_same_steps_and_syncs(build: Any, options):
    params, gradients = problem(build, 2)
    options = {**options, "axis_name": helpers.AXIS}
    injected = optax.inject_hyperparams(build, static_args=("budget",))(RATE, **options)
    run = list(helpers.run_mesh(injected, params, gradients))
    expected = list(helpers.run_mesh(build(RATE, **options), params, gradients))
    close(run, expected)
    inside = [(params, state.inner_state) for params, state in run]
    decided = helpers.decisions(inside)
    assert decided == helpers.decisions(expected)
    assert 2 <= sum(decided) < STEPS


@pytest.mark.parametrize(("build", "arguments", "options"), ONE_REPLICA[1:])
def test_a_learning_rate_that_is_set_is_taken(build: Any, arguments, options):
    params, (gradients, *_) = problem(build, 1)
    gradients = jax.tree.map(lambda g: g[0], gradients)
    tx: Any = optax.inject_hyperparams(build)(*arguments, **options)
    update, norms = jax.jit(tx.update), []
    for factor in (1.0, 3.0):
        state = tx.init(params)
        rate = state.hyperparams["learning_rate"]
        state.hyperparams["learning_rate"] = factor * rate
        updates, _ = update(gradients, state, params)
        norms.append(optax.tree.norm({n: updates[n] for n in MATRICES}))
    np.testing.assert_allclose(norms[1], 3 * norms[0], rtol=1e-5)  # float32


@pytest.mark.parametrize("build", [cd.local_muon, cd.curvadion])
def test_a_scheduled_momentum_is_one_that_is_injected(build: Any):
    params, gradients = problem(build, 2)
    rising = optax.linear_schedule(0.5, 0.9, STEPS)
    options = {"budget": 0.5, "axis_name": helpers.AXIS}
    inject = optax.inject_hyperparams(build, static_args=("budget",))
    injected: Any = inject(RATE, momentum=rising, **options)
    expected = list(helpers.run_mesh(injected, params, gradients))
    tx = build(RATE, momentum=rising, **options)
    close(helpers.run_mesh(tx, params, gradients), expected)
    momentum = expected[-1][1].hyperparams["momentum"]
    np.testing.assert_allclose(momentum, rising(STEPS - 1), rtol=1e-6)  # float32
    constant = list(helpers.run_mesh(build(RATE, **options), params, gradients))
    moved = constant[-1][0]["tall"] - expected[-1][0]["tall"]
    assert np.abs(moved).max() > 100 * ATOL
