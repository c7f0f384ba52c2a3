"""What the tests of Dion on replicas share: runs by a sync and by a `reduce_fn`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dion_runs import MU, normal, random_state, rank_of, zeros
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

REPLICAS, STEPS = 8, 3
SHAPES = {"wide": (5, 9), "tall": (9, 5), "stack": (2, 5, 9)}
MESH = cd.replicas.make_mesh(REPLICAS)
shard_map = functools.partial(jax.shard_map, mesh=MESH, out_specs=P("replica"))


def sends_factors(rank):
    """Full rank sends the matrix itself, which is then common to all replicas."""
    return rank_of((5, 9), rank) < 5


def first_state(rank, dtype: Any = np.float64):
    r = rank_of((5, 9), rank)
    q_shapes = {"wide": (5, r), "tall": (5, r), "stack": (2, 5, r)}
    return random_state(zeros(SHAPES, dtype), q_shapes)


def synchronous(tx) -> Any:
    return cd.adaptive_sync(
        tx, triggers.always(), synchronizers.average_factors(), "replica"
    )


def reduced(tx):
    """Dion whose factors are averaged by a function of the test's own."""

    def mean(arrays, made_of):
        assert arrays.keys() == made_of.keys()
        means = lax.pmean(arrays, "replica")
        return lax.pcast(means, ("replica",), to="varying")

    return tx._replace(update=functools.partial(tx.update, reduce_fn=mean))


@functools.lru_cache(maxsize=None, typed=True)  # 1 is rank one, 1.0 is full rank
def compiled(rank, by):
    """(state, gradients [replicas, steps, ...]) -> updates, states, by replica."""
    tx = cd.scale_by_dion(rank, MU)
    tx = synchronous(tx) if by == "sync" else reduced(tx)

    def body(state, gradients):
        params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)

        def one(state, gradient):
            updates, state = tx.update(gradient, state, params)
            return state, (updates, state)

        return lax.scan(one, state, gradients)[1]

    def strip(*args):
        result = body(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], result)

    return jax.jit(shard_map(strip, in_specs=P("replica")))


def state_of(rank, by, dtype: Any = np.float64):
    """Dion's first state, and that of the optimizer that it is a part of."""
    dion = first_state(rank, dtype)
    if by == "reduce_fn":
        return dion, dion
    outer = synchronous(cd.scale_by_dion(rank, MU)).init(zeros(SHAPES, dtype))
    return dion, outer._replace(
        inner_state=dion, sync_state=outer.sync_state._replace(common=[dion.dion_q])
    )


def run(rank, by, gradients):
    """First state, and updates and Dion's states [replicas, steps, ...] from it."""
    dion, state = state_of(rank, by, gradients["wide"].dtype)
    copies = jax.tree.map(lambda x: np.stack([x] * REPLICAS), state)
    updates, states = compiled(rank, by)(copies, gradients)
    if by == "sync":
        assert states.metrics.synced.all()
        states = states.inner_state
    return dion, jax.tree.map(np.asarray, updates), jax.tree.map(np.asarray, states)


def local_gradients(seed=0, dtype: Any = np.float64):
    """[replicas, steps, ...]: a common part, and as much of each replica's own."""
    own = normal(SHAPES, REPLICAS * STEPS, seed, dtype)
    own = {n: g.reshape(REPLICAS, STEPS, *SHAPES[n]) for n, g in own.items()}
    return {name: g + g.mean(axis=0) for name, g in own.items()}
