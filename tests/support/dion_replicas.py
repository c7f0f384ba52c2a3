"""What the tests of Dion on replicas share: runs by a sync and by a `reduce_fn`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dion_runs import MU, normal, random_state, rank_of, zeros
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

REPLICAS, STEPS = 8, 3
SHAPES = {"wide": (5, 9), "tall": (9, 5), "stack": (2, 5, 9)}
NUMBERS = cd.DimensionNumbers(-2, -1)
MESH = cd.replicas.simulated(REPLICAS)


def sends_factors(rank):
    """Full rank sends the matrix itself, which is then common to all replicas."""
    return rank_of((5, 9), rank) < 5


def first_state(rank, dtype: Any = np.float64):
    r = rank_of((5, 9), rank)
    q_shapes = {"wide": (5, r), "tall": (5, r), "stack": (2, 5, r)}
    return random_state(zeros(SHAPES, dtype), q_shapes)


def synchronous(tx) -> Any:
    synchronizer = synchronizers.average_factors(NUMBERS)
    return cd.adaptive_sync(tx, triggers.always(), synchronizer, MESH)


def reduced(tx) -> Any:
    """Dion whose factors are averaged by a function of the test's own."""

    def mean(arrays, made_of):
        assert arrays.keys() == made_of.keys()
        return lax.pmean(arrays, "replica")

    update = functools.partial(tx.update, reduce_fn=mean)
    return tx._replace(update=jax.vmap(update, axis_name="replica"))


@functools.lru_cache(maxsize=None, typed=True)  # 1 is rank one, 1.0 is full rank
def compiled(rank, by):
    """(state, gradients [steps, replicas, ...]) -> updates, states, by step."""
    tx = cd.scale_by_dion(rank, MU, dimension_numbers=NUMBERS)
    tx = synchronous(tx) if by == "sync" else reduced(tx)

    def one(state, gradient):
        params = jax.tree.map(jnp.zeros_like, gradient)
        updates, state = tx.update(gradient, state, params)
        return state, (updates, state)

    return jax.jit(lambda state, gradients: lax.scan(one, state, gradients)[1])


def state_of(rank, by, dtype: Any = np.float64):
    """Dion's first state, and that of the optimizer that it is a part of."""
    dion = first_state(rank, dtype)
    rows = jax.tree.map(lambda x: np.stack([x] * REPLICAS), dion)
    if by == "reduce_fn":
        return dion, rows
    params = cd.replicas.replicate(zeros(SHAPES, dtype), MESH)
    tx = cd.scale_by_dion(rank, MU, dimension_numbers=NUMBERS)
    outer = synchronous(tx).init(params)
    return dion, outer._replace(
        common=outer.common._replace(sync_state=[dion.dion_q]),
        rows=outer.rows._replace(
            inner_state=rows._replace(partition=outer.rows.inner_state.partition)
        ),
    )


def run(rank, by, gradients):
    """First state, and updates and Dion's states [replicas, steps, ...] from it."""
    dion, state = state_of(rank, by, gradients["wide"].dtype)
    by_step = jax.tree.map(lambda x: x.swapaxes(0, 1), gradients)
    updates, states = compiled(rank, by)(state, by_step)
    if by == "sync":
        assert not np.any(states.counters.since)
        states = states.rows.inner_state
    by_replica = lambda x: np.asarray(x).swapaxes(0, 1)
    return dion, jax.tree.map(by_replica, updates), jax.tree.map(by_replica, states)


def local_gradients(seed=0, dtype: Any = np.float64):
    """[replicas, steps, ...]: a common part, and as much of each replica's own."""
    own = normal(SHAPES, REPLICAS * STEPS, seed, dtype)
    own = {n: g.reshape(REPLICAS, STEPS, *SHAPES[n]) for n, g in own.items()}
    return {name: g + g.mean(axis=0) for name, g in own.items()}
