"""What the tests of Dion share: compiled runs, gradients, comparison up to signs.

Compiling takes most of the time of these tests. The shapes are such that the factors
P of all three have nine rows: one orthonormalisation where their ranks are equal.
"""

import functools
import math
from typing import Any

import jax
import numpy as np

import curvadion_jax as cd

MU = 0.9
# Layout of Flax, (fan_in, fan_out). P lies on fan_out, fan_in, fan_out.
SHAPES = {"wide": (5, 9), "tall": (9, 5), "square": (9, 9)}
NUMBERS = cd.DimensionNumbers(0, 1)


def normal(shapes, steps, seed=0, dtype: Any = np.float64) -> dict[str, Any]:
    """Tree of normal arrays [steps, *shape]."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(steps, *shape)).astype(dtype)
        for name, shape in shapes.items()
    }


def zeros(shapes, dtype: Any = np.float64) -> dict[str, Any]:
    """Parameters of these shapes."""
    return {name: np.zeros(shape, dtype) for name, shape in shapes.items()}


def rank_of(shape, rank):
    """The rank of a matrix (fan_in, fan_out), from its definition."""
    return rank if isinstance(rank, int) else math.ceil(rank * min(shape))


def random_state(params, q_shapes, seed=0) -> Any:
    """State with zero momentum and random unit columns in Q, made without JAX."""
    rng, dtype = np.random.default_rng(100 + seed), jax.tree.leaves(params)[0].dtype
    qs = {name: rng.normal(size=q_shapes[name]) for name in params}
    unit = {n: q / np.linalg.norm(q, axis=-2, keepdims=True) for n, q in qs.items()}
    momentum = {name: np.zeros_like(p) for name, p in params.items()}
    return cd.DionState(momentum, {n: q.astype(dtype) for n, q in unit.items()})


@functools.lru_cache(maxsize=None, typed=True)  # 1 is rank one, 1.0 is full rank
def compiled(rank) -> Any:
    """One compilation of the update for all tests that use this rank."""
    return jax.jit(cd.scale_by_dion(rank, MU, dimension_numbers=NUMBERS).update)


def run(tx, params, gradients, state) -> Any:
    """Updates and states of consecutive steps, one compiled scan.

    Args:
        tx: the optimizer.
        params: its parameters, constant.
        gradients: tree with a leading axis of steps.
        state: first state.

    Returns:
        Updates and states with a leading axis of steps.
    """

    @jax.jit
    def scan(params, gradients, state):
        def one(state, gradient):
            updates, state = tx.update(gradient, state, params)
            return state, (updates, state)

        return jax.lax.scan(one, state, gradients)[1]

    return scan(params, gradients, state)


def close(actual, expected, atol, what: Any = ""):
    """Assert that two arrays agree to an absolute tolerance."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=0,
        atol=atol,
        err_msg=str(what),
    )


def same_columns(actual, expected, atol, what: Any = ""):
    """The same but for the signs of the columns."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    signs = np.sign(np.sum(actual * expected, axis=-2, keepdims=True))
    close(actual * signs, expected, atol, what)
