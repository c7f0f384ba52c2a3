"""Dion over replicas: factors are averaged, the momentum stays where it is.

By `adaptive_sync`, and by a `reduce_fn` of the test's own.
"""

import jax
import numpy as np
import pytest
import reference as ref
from dion_replicas import REPLICAS, SHAPES, STEPS, local_gradients, run, sends_factors
from dion_runs import MU, close, same_columns

# Float64 against float64; a mean over replicas is summed in another order. Measured
# 5e-15, at full rank.
FLOAT64_ATOL = 1e-13


def kernels(name):
    """Indices of the plain kernels in a leaf."""
    return [np.s_[0], np.s_[1]] if name == "stack" else [np.s_[:]]


WAYS = [(0.25, "shard_map"), (1.0, "shard_map"), (0.5, "vmap"), (1.0, "vmap")]
CASES = [
    pytest.param(
        *(*way, by), marks=() if way == (0.25, "shard_map") else pytest.mark.slow
    )
    for way in WAYS
    for by in ("sync", "reduce_fn")
]


@pytest.mark.parametrize(("rank", "how", "by"), CASES, ids=lambda value: f"{value}")
def test_equals_the_reference_and_dion_on_the_mean_gradient(rank, how, by):
    gradients = local_gradients()
    with jax.enable_x64(True):
        first, updates, states = run(rank, how, by, gradients)
    for name in SHAPES:
        for part in kernels(name):
            index = (slice(None), slice(None), part)
            g, u = gradients[name][index], updates[name][index]
            m, q = states.momentum[name][index], states.q[name][index]
            momenta, qs = [np.zeros(g.shape[2:])] * REPLICAS, [first.q[name][part]] * 8
            mean_momentum, mean_q = momenta[0], qs[0]
            for t in range(STEPS):
                what = (name, part, t)
                directions, momenta, qs = ref.dion_step_average_factors(
                    list(g[:, t]), momenta, qs, mu=MU
                )
                direction, mean_momentum, mean_q = ref.dion_step(
                    g[:, t].mean(axis=0), mean_momentum, mean_q, mu=MU
                )
                for k in range(REPLICAS):
                    close(u[k, t], directions[k], FLOAT64_ATOL, what)
                    close(u[k, t], direction, FLOAT64_ATOL, what)
                    same_columns(q[k, t], qs[k], FLOAT64_ATOL, what)
                    if sends_factors(rank):
                        close(m[k, t], momenta[k], FLOAT64_ATOL, what)
                close(m[:, t].mean(axis=0), mean_momentum, FLOAT64_ATOL, what)


@pytest.mark.parametrize(("rank", "how", "by"), CASES, ids=lambda value: f"{value}")
def test_what_is_shared_is_equal_to_the_bit(rank, how, by):
    with jax.enable_x64(True):
        _, updates, states = run(rank, how, by, local_gradients())
    for name in SHAPES:
        for array in (updates[name], states.q[name]):
            np.testing.assert_array_equal(array, np.stack([array[0]] * REPLICAS))
        if sends_factors(rank):
            momentum = states.momentum[name][:, -1]
            for k in range(1, REPLICAS):
                assert np.abs(momentum[k] - momentum[0]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["sync", "reduce_fn"])
def test_paper_momentum_equals_dion_on_the_mean_gradient(by):
    gradients = local_gradients()
    with jax.enable_x64(True):
        first, updates, _ = run(0.25, "vmap", by, gradients, error_feedback=False)
    momentum, q = np.zeros((9, 5)), first.q["tall"]
    for t in range(STEPS):
        direction, momentum, q = ref.dion_step(
            gradients["tall"][:, t].mean(axis=0),
            momentum,
            q,
            mu=MU,
            error_feedback=False,
        )
        close(updates["tall"][3, t], direction, FLOAT64_ATOL, t)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_bad_gradient_of_one_replica_shows_on_all(bad):
    gradients = local_gradients()
    gradients["wide"][5, 0, 2, 3] = bad
    with jax.enable_x64(True):
        _, updates, _ = run(0.25, "shard_map", "reduce_fn", gradients)
    assert np.isnan(updates["wide"]).all()
    assert np.isfinite(updates["tall"]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_sync_excludes_the_replica_with_a_bad_gradient(bad):
    gradients = local_gradients()
    others = np.delete(gradients["tall"][:, 0], 5, axis=0)
    gradients["wide"][5, 0, 2, 3] = bad
    with jax.enable_x64(True):
        first, updates, _ = run(0.25, "shard_map", "sync", gradients)
    assert all(np.isfinite(u).all() for u in updates.values())
    momentum = np.zeros((9, 5))
    expected, _, _ = ref.dion_step(others.mean(0), momentum, first.q["tall"], mu=MU)
    for update in updates["tall"][:, 0]:
        close(update, expected, FLOAT64_ATOL)
