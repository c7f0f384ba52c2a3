"""Dion where the momentum is zero, of low rank, huge or not finite."""

import jax
import numpy as np
import pytest
from dion_runs import SHAPES, close, compiled, normal, random_state, zeros

import curvadion_jax as cd
from curvadion_jax.matrices._power_iteration import unit_columns

# One step in float32, numbers of order one: measured 2.4e-7.
FLOAT32_ATOL = 3e-6
# Epsilon = 1e-8 in the norm of a column of 200 eps.
UNIT_ATOL = 1e-3
# Directions of order one, 2^-24 times the condition number of B Q: measured 2e-6.
SPAN_ATOL = 2e-5
Q_SHAPES = {"wide": (5, 3), "tall": (5, 3), "square": (9, 3)}


def gradients_at(seed):
    return jax.tree.map(lambda g: g[0], normal(SHAPES, 1, seed, np.float32))


def low_rank(shape, rank):
    """A gradient of exact rank, and the projections on its two spaces."""
    rng = np.random.default_rng(0)
    u, v = (rng.integers(-4, 5, size=(n, rank)).astype(float) for n in shape)
    bases = [np.linalg.qr(x)[0] for x in (u, v)]
    return (u @ v.T).astype(np.float32), [b @ b.T for b in bases]


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_momentum_moves_nothing_else(rank, full):
    cases = {name: low_rank(shape, rank) for name, shape in SHAPES.items()}
    q_shapes = {name: (min(x), min(x)) for name, x in SHAPES.items()}
    state = random_state(zeros(SHAPES, np.float32), q_shapes if full else Q_SHAPES)
    for t in range(4):
        gradients = {name: (t - 1.5) * g for name, (g, _) in cases.items()}
        gradients = jax.tree.map(np.float32, gradients)
        updates, state = compiled(3)(gradients, state)
        for name, (_, (left, right)) in cases.items():
            scale = np.sqrt(SHAPES[name][1] / SHAPES[name][0])
            update = np.asarray(updates[name], np.float64) / scale
            close(update, left @ update @ right, SPAN_ATOL, (name, t))
            assert 0.5 < np.linalg.norm(update, 2) < np.sqrt(rank) + SPAN_ATOL


# Share of random starts from which a column of rounding noise passes for momentum. It
# does where the products of the momentum with Q's first columns are ill-conditioned
# beyond what the threshold allows for: measured 1.5% with 100 eps, 14% with 10 eps.
LEAKS = 0.04


@pytest.mark.slow
def test_low_rank_momentum_from_random_starts():
    rng, starts, rank = np.random.default_rng(0), 400, 4
    u, v = (rng.normal(size=(starts, 64, rank)) for _ in range(2))
    gradients = {"stack": np.float32(u @ v.mT)}
    state = random_state(gradients, {"stack": (starts, 64, 16)})
    tx = cd.scale_by_dion(0.25, dimension_numbers=cd.DimensionNumbers(1, 2))
    update, _ = jax.jit(tx.update)(gradients, state)
    update = np.asarray(update["stack"], np.float64)
    left, right = (b @ b.mT for b in (np.linalg.qr(u)[0], np.linalg.qr(v)[0]))
    outside = np.linalg.norm(update - left @ update @ right, axis=(1, 2))
    assert np.mean(outside > 0.5) < LEAKS


@pytest.mark.parametrize(("eps", "is_present"), [(50, False), (200, True)])
def test_a_column_is_absent_up_to_100_eps_of_all(eps, is_present):
    """It then keeps its column of Q."""
    size = np.float32(eps * np.finfo(np.float32).eps)
    right = np.float32([[1, 0], [0, -size], [0, 0]])
    old = np.float32([[0, 0], [0, 0], [1, 1]])
    new, present = unit_columns(right, old)
    assert present.tolist() == [[True, is_present]]
    close(new, [[1, 0], [0, -is_present], [0, not is_present]], UNIT_ATOL)


def test_huge_gradients_are_not_taken_for_nothing():
    size = 1e37
    params = zeros(SHAPES, np.float32)
    state = random_state(params, Q_SHAPES)
    small = jax.tree.map(lambda g: g / np.abs(g).max(), gradients_at(5))
    huge = jax.tree.map(lambda g: np.float32(size) * g, small)
    updates, _ = compiled(3)(huge, state)
    expected, _ = compiled(3)(small, state)
    for name in SHAPES:
        # One rounding of every gradient, and epsilon = 1e-8 in the column norms.
        close(updates[name], expected[name], FLOAT32_ATOL, name)


def test_bad_gradient_shows_and_stays_in_its_matrix():
    state = random_state(zeros(SHAPES, np.float32), Q_SHAPES)
    good, gradients = gradients_at(4), gradients_at(4)
    gradients["tall"][2, 1] = np.inf
    updates, new_state = compiled(3)(gradients, state)
    expected, expected_state = compiled(3)(good, state)
    assert np.isnan(updates["tall"]).all()
    assert np.isnan(new_state.momentum["tall"]).all()
    for name in ("wide", "square"):
        np.testing.assert_array_equal(updates[name], expected[name])
        got, want = new_state.momentum[name], expected_state.momentum[name]
        np.testing.assert_array_equal(got, want)
