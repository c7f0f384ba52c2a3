"""`optax.inject_hyperparams` takes every optimizer; ranks and budgets are static."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

# The numbers of an optimizer are arrays of its state, and no constants of the program,
# which then may round otherwise: five steps of parameters of order 1. Measured: 2.4e-7.
ATOL = 1e-6
STEPS, RATE = 5, 0.01


def problem(replicas):
    """Parameters and gradients."""
    return helpers.make_params(), helpers.make_gradients(STEPS, replicas)


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


def test_a_scheduled_momentum_is_one_that_is_injected():
    """On replicas, which take the same steps and syncs."""
    params, gradients = problem(2)
    rising = optax.linear_schedule(0.5, 0.9, STEPS)
    mesh = cd.replicas.simulated(2)
    options = {"momentum": rising, "budget": 0.5, "mesh": mesh}
    inject = optax.inject_hyperparams(cd.local_muon, static_args=("budget", "mesh"))
    injected: Any = inject(RATE, **options)
    expected = list(helpers.run(injected, mesh, params, gradients))
    run = list(helpers.run(cd.local_muon(RATE, **options), mesh, params, gradients))
    close(run, expected)
    decided = helpers.decisions(run)
    assert decided == helpers.decisions([(p, s.inner_state) for p, s in expected])
    assert 2 <= sum(decided) < STEPS
    momentum = expected[-1][1].hyperparams["momentum"]
    np.testing.assert_allclose(momentum, rising(STEPS - 1), rtol=1e-6)  # float32


def test_a_learning_rate_that_is_set_is_taken():
    params, (gradients, *_) = problem(1)
    gradients = jax.tree.map(lambda g: g[0], gradients)
    tx: Any = optax.inject_hyperparams(cd.dion)(RATE)
    update, norms = jax.jit(tx.update), []
    for factor in (1.0, 3.0):
        state = tx.init(params)
        state.hyperparams["learning_rate"] *= factor
        updates, _ = update(gradients, state, params)
        norms.append(optax.tree.norm({n: updates[n] for n in helpers.MATRICES}))
    np.testing.assert_allclose(norms[1], 3 * norms[0], rtol=1e-5)  # float32


def test_an_injected_threshold_is_not_traced_anew():
    def factory(learning_rate, threshold):
        return cd.adaptive_sync(
            optax.sgd(learning_rate, 0.9),
            cd.triggers.relative_momentum_change(threshold),
            cd.synchronizers.average_gradients(),
        )

    tx: Any = optax.inject_hyperparams(factory)(0.1, threshold=1e6)
    params, gradients = problem(1)
    state, traces, decided = tx.init(params), [], []

    @jax.jit
    def update(gradients, state):
        traces.append(0)
        return tx.update(gradients, state, params)[1]

    for tree, threshold in zip(gradients, (1e6, 1e6, 0, 1e6), strict=False):
        state.hyperparams["threshold"] = jnp.float32(threshold)
        state = update(jax.tree.map(lambda g: g[0], tree), state)
        decided.append(int(optax.tree.get(state, "since")) == 0)
    assert decided == [True, False, True, False]
    assert len(traces) == 1
