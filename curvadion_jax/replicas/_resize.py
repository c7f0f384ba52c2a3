"""The state of N replicas for another number of them."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _memory, _paths
from curvadion_jax._dion import DionState
from curvadion_jax.replicas._checks import check_leading, count_leading
from curvadion_jax.replicas._mesh import AXIS, check_axis

# What all replicas have alike, or what is no number to take a mean of.
_TAKEN = {("sync_state", "anchor"), ("sync_state", "common")}


def resize(state: Any, mesh: Mesh, axis_name: str = AXIS) -> Any:
    """Gives a state to another number of replicas.

    New replica i of n stands where old replicas i N / n to (i + 1) N / n stood. It gets

    * the mean of their floating-point arrays (parameters, momenta, residuals),
      weighted with the overlap, so that the mean over all replicas stays what it was:
      with half as many the mean of two, with twice as many two copies of one;
    * of all else (integers, keys, Dion's Q, the trigger's state, and what all
      have alike: anchor, what is common, counters) that of the first of them. Copies of
      a random key (`jax.random.key`, not an array of `uint32`) are folded with the
      number of the replica.

    Nothing else changes: between two syncs replicas stay as far apart as they were.
    Counters count on, and bytes are then told for the new number of replicas.

    With several processes save and restore a checkpoint instead,
    ``checkpoint.restore(directory, target, replicas=n)``.

    Args:
      state: parameters and optimizer state, in any tree, with a leading replica axis.
      mesh: mesh with the new number of replicas. Within a replica arrays are divided as
        they were, as far as its axes have the same names.
      axis_name: name of the replica axis.

    Returns:
      The state on the mesh.

    Raises:
      ValueError: if leaves have no common leading axis, or the mesh has no axis of the
        name.

    Example:
      >>> from curvadion_jax import replicas
      >>> state = {"w": jnp.array([[1.0], [2.0]]), "count": jnp.array([5, 5])}
      >>> state = replicas.resize(state, replicas.make_mesh(1))
      >>> state["w"].tolist(), state["count"].tolist()
      ([[1.5]], [5])
    """
    check_axis(mesh, axis_name)
    number = mesh.shape[axis_name]
    leaves, structure = jax.tree.flatten(state)
    if not leaves:
        return state
    old = count_leading(state, "state")
    check_leading(state, old, "state", "replicas; see replicas.replicate")
    averaged = is_averaged(state)

    def placed(leaf, average):
        placement = NamedSharding(
            mesh, _spec(leaf, mesh, axis_name), memory_kind=_memory_kind(leaf)
        )
        x = _resized(leaf, number=number, average=average)
        # One at a time: many small programs that communicate, at once on a CPU of few
        # cores, were seen to end in XLA's abort after waiting for each other.
        return jax.block_until_ready(jax.device_put(x, placement))

    new = [placed(x, mean) for x, mean in zip(leaves, averaged, strict=True)]
    return jax.tree.unflatten(structure, new)


def _spec(leaf: jax.Array, mesh: Mesh, axis_name: str) -> P:
    placement = getattr(leaf, "sharding", None)
    if not isinstance(placement, NamedSharding):
        return P(axis_name)

    def known(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in mesh.shape)
        return (names[0] if len(names) == 1 else names) or None

    return P(axis_name, *map(known, placement.spec[1:]))


def _memory_kind(leaf: jax.Array) -> str | None:
    return leaf.sharding.memory_kind if isinstance(leaf, jax.Array) else None


def is_averaged(state: Any) -> list[bool]:
    """For every leaf of a state whether replicas' values have a mean that means it."""
    leaves = _paths.leaves_with_names(state)
    below: dict[tuple[str, ...], dict[str, set]] = defaultdict(lambda: defaultdict(set))
    for names, _ in leaves:
        for index, name in enumerate(names):
            below[names[:index]][name].add(names[index + 1 :])

    optimizers = _counters.optimizers(names for names, _ in leaves)

    def is_q(names: tuple[str, ...], index: int) -> bool:
        # By name: `flax.nnx.split` makes dictionaries of named tuples.
        beside = below[names[:index]]
        is_dion = beside.keys() == set(DionState._fields)
        return names[index] == "q" and is_dion and beside["q"] == beside["momentum"]

    def taken(names: tuple[str, ...]) -> bool:
        return (
            _counters.is_within(names, optimizers, {"trigger_state", "metrics"})
            or not _TAKEN.isdisjoint(itertools.pairwise(names))
            or any(is_q(names, index) for index in range(len(names)))
        )

    return [
        jnp.issubdtype(leaf.dtype, jnp.floating) and not taken(names)
        for names, leaf in leaves
    ]


def sources(old: int, new: int) -> np.ndarray:
    """The first old replica in whose place each new one stands."""
    return np.arange(new) * old // new


def resized(x: jax.Array, number: int, average: bool) -> jax.Array:
    """One array of a state for another number of replicas."""
    old = x.shape[0]
    if old == number:
        return x
    x, first = _memory.to_device(x), sources(old, number)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return distinct(x, first, np.append(False, first[1:] == first[:-1]))
    if not average or number % old == 0:
        return x[first]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # From the first of them, so that equal replicas give their own value.
    base = wide[first]
    parts = [
        sum(share * (wide[source] - base[index]) for source, share in row)
        for index, row in enumerate(_overlaps(old, number))
    ]
    mean = base + jnp.stack(parts)
    # The best loss so far may be infinite, and infinity less infinity is NaN.
    return jnp.where(jnp.isfinite(base), mean, base).astype(x.dtype)


_resized = jax.jit(resized, static_argnames=("number", "average"))


def before(leaf: jax.ShapeDtypeStruct, replicas: int) -> jax.ShapeDtypeStruct:
    """Where to read an array of another number of replicas that is to become this one.

    Divided over the replicas where their number divides, else whole on each.
    """
    placement, shape = leaf.sharding, (replicas, *leaf.shape[1:])
    if isinstance(placement, NamedSharding):
        placement = placement.update(memory_kind=None)
        if replicas % leaf.shape[0]:
            placement = placement.update(spec=P(None, *placement.spec[1:]))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placement)


def onto(leaf: jax.ShapeDtypeStruct, x: jax.Array, average: bool) -> jax.Array:
    """The array for the replicas of a target's leaf, in its place."""
    resize_leaf = jax.jit(
        resized, static_argnames=("number", "average"), out_shardings=leaf.sharding
    )
    return resize_leaf(x, number=leaf.shape[0], average=average)


def _overlaps(old: int, new: int) -> list[Sequence[tuple[int, float]]]:
    """For each new replica the old ones in its place, and their shares of it."""
    rows = []
    for index in range(new):
        begin, end = index * old / new, (index + 1) * old / new
        shares = [
            (source, (min(end, source + 1) - max(begin, source)) * new / old)
            for source in range(old)
        ]
        rows.append([(source, share) for source, share in shares if share > 1e-9])
    return rows


def distinct(keys: jax.Array, source: np.ndarray, copied: np.ndarray) -> jax.Array:
    """Random keys of other replicas, the copies folded with their own number."""
    flat = keys[source].reshape(len(source), -1)
    folded = jax.vmap(lambda row, i: jax.vmap(jax.random.fold_in, (0, None))(row, i))(
        flat, jnp.arange(len(source))
    )
    chosen = jnp.where(copied[:, None], folded, flat)
    return chosen.reshape(len(source), *keys.shape[1:])
