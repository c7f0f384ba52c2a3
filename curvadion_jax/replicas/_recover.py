"""Copies replicas: to replace those that are not finite, or to change their number."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _memory, _paths, _trees
from curvadion_jax.replicas._arrays import count_replicas, on_host
from curvadion_jax.replicas._mesh import AXIS, check_mesh


def repair(state: Any, also: Iterable[int] = ()) -> tuple[Any, list[int]]:
    """Replaces replicas that are not finite by copies of the first finite one.

    A sync excludes a replica whose parameters hold NaN or Inf until they are replaced.
    Call it, in all processes, when `curvadion_jax.metrics.read` shows a replica as
    excluded again and again. Where syncs average gradients or factors, a replica whose
    momentum restarted is finite and differs from the others: name it in `also`.

    A copy keeps its own counters, and has no residual.

    Args:
      state: all that differs between replicas, in any tree with a leading replica axis.
        A replica is not finite if it has a NaN, or an Inf where another has none;
        counters and the trigger's state aside.
      also: numbers of replicas to replace in any case, the union over processes.

    Returns:
      The state, and the numbers of the replicas that were replaced.

    Raises:
      ValueError: if no replica is finite.

    Example:
      >>> state = {"w": jnp.array([[1.0], [jnp.nan], [3.0]])}
      >>> state, replaced = repair(state)
      >>> state["w"].ravel().tolist(), replaced
      ([1.0, 1.0, 3.0], [1])
    """
    replicas = count_replicas(state, "state")
    named = np.zeros(replicas, bool)
    named[list(also)] = True
    if jax.process_count() > 1:
        named = np.any(multihost_utils.process_allgather(named), axis=0)
    leaves = _paths.leaves_with_names(state)
    optimizers = _counters.optimizer_paths(state)
    floating = [
        x
        for names, x in leaves
        if jnp.issubdtype(x.dtype, jnp.inexact)
        and not _counters.is_within(names, optimizers, "trigger_state", "metrics")
    ]
    sound = ~named & (on_host(_are_finite, floating) if floating else True)
    if sound.all():
        return state, []
    if not sound.any():
        raise ValueError(
            f"None of the {replicas} replicas is finite and not in also. Restore a "
            "checkpoint."
        )
    source = np.where(sound, np.arange(replicas), np.flatnonzero(sound)[0])

    def row(names, x):
        if _counters.is_within(names, optimizers, "metrics"):
            return x
        if _counters.is_within(names, optimizers, "sync_state/residual"):
            return jnp.where(sound.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
        return x[source]

    def copy(arrays):
        pairs = zip(leaves, _memory.to_device(arrays), strict=True)
        return [row(names, x) for (names, _), x in pairs]

    arrays, structure = jax.tree.flatten(state)
    shardings = [x.sharding for x in arrays]
    arrays = jax.jit(copy, out_shardings=shardings)(arrays)
    return structure.unflatten(arrays), np.flatnonzero(~sound).tolist()


def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    """Which replicas are finite, bool[N]."""
    # The best loss so far, or a mask, may be infinite on all replicas.
    wrong = [
        jnp.isnan(x) | (jnp.isinf(x) & ~jnp.all(jnp.isinf(x), 0, keepdims=True))
        for x in arrays
    ]
    found = [jnp.any(x, axis=tuple(range(1, x.ndim))) for x in wrong]
    return ~jnp.any(jnp.stack(found), axis=0)


def resize(state: Any, mesh: Mesh, *, axis_name: str = AXIS) -> Any:
    """Changes the number of replicas of a state to a multiple or a divisor of it.

    With fewer replicas, each new one gets the mean of k neighbours' floating-point
    arrays, and all else (integers, keys, Dion's Q, the trigger's state, the anchor,
    counters) of the first of them. With more, each is copied k times.

    With several processes save and restore a checkpoint instead,
    ``checkpoint.restore(directory, target, replicas=n)``.

    Args:
      state: all that differs between replicas, in any tree with a leading replica axis.
      mesh: mesh with the new number of replicas. Within a replica arrays are sharded as
        they were, if it has the axes.
      axis_name: name of the replica axis.

    Example:
      >>> from curvadion_jax import replicas
      >>> state = {"w": jnp.array([[1.0], [2.0]]), "count": jnp.array([5, 5])}
      >>> state = replicas.resize(state, replicas.make_mesh(1))
      >>> state["w"].tolist(), state["count"].tolist()
      ([[1.5]], [5])
    """
    check_mesh(mesh, axis_name)
    count_replicas(state, "state")
    replicas = mesh.shape[axis_name]

    def placed(leaf, average):
        old = getattr(leaf, "sharding", None)
        inner = old.spec[1:] if isinstance(old, NamedSharding) else ()
        if not set(jax.tree.leaves(tuple(inner))) <= set(mesh.shape):
            inner = ()
        sharding = NamedSharding(mesh, P(axis_name, *inner))
        if old is not None:
            sharding = sharding.with_memory_kind(str(old.memory_kind))
        x = _resized(leaf, replicas=replicas, average=average)
        # One at a time: on a CPU of few cores many small programs that communicate
        # wait for each other, until XLA aborts.
        return jax.block_until_ready(jax.device_put(x, sharding))

    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten(map(placed, leaves, is_averaged(state)))


def is_averaged(state: Any) -> list[bool]:
    """Whether `resize` takes means, for every leaf of a state."""
    leaves = _paths.leaves_with_names(state)
    optimizers = _counters.optimizer_paths(state)
    kept = ("trigger_state", "metrics", "sync_state/anchor", "sync_state/common")
    return [
        jnp.issubdtype(leaf.dtype, jnp.inexact)
        and not _counters.is_within(names, optimizers, *kept)
        # Columns of Q may have opposite signs, and cancel in a mean.
        and "dion_q" not in names
        for names, leaf in leaves
    ]


def resized(x: jax.Array, replicas: int, average: bool) -> jax.Array:
    """Changes the number of replicas of one array, [old, ...] -> [replicas, ...]."""
    old = len(x)
    if old == replicas:
        return x
    if old % replicas and replicas % old:
        raise ValueError(
            f"A state of {old} replicas cannot become one of {replicas}. Choose a "
            f"multiple or a divisor of {old}."
        )
    x = _memory.to_device(x)
    first = np.arange(replicas) * old // replicas
    if not average or replicas > old:
        return x[first]
    groups = _trees.wide(x).reshape(replicas, old // replicas, *x.shape[1:])
    # From the first of each group, so that equal replicas give their own value.
    base = groups[:, 0]
    mean = base + jnp.mean(groups - groups[:, :1], axis=1)
    # The best loss so far may be infinite, and infinity less infinity is NaN.
    return jnp.where(jnp.isfinite(base), mean, base).astype(x.dtype)


_resized = jax.jit(resized, static_argnames=("replicas", "average"))
