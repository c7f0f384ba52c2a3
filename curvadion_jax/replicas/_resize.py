"""Changes the number of rows of a state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _dtypes, _finite, _memory, _trees
from curvadion_jax.matrices._dion import DionState
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._rows import AXIS, Replicas
from curvadion_jax.replicas import _keys
from curvadion_jax.step._sync_state import AdaptiveSyncState, Rows


def resize(state: Any, mesh: Replicas) -> Any:
    """Changes the number of replicas of a state to a multiple or a divisor of it.

    With fewer replicas, each new one gets the mean of k neighbours' floating-point
    numbers, and all else of the first of them: integers, keys, what a trigger
    remembers, and the inner optimizer's state but for Dion's momenta. Its parts may
    belong together, as bases and what is kept in them, or codes and their scales, whose
    means are none. An array with NaN or Inf is left out of a mean, unless all have one.
    With more replicas, each is copied k times, but random keys are split. What is
    common stays.

    With several processes save and restore a checkpoint instead,
    ``checkpoint.restore(directory, target, resize=True)``.

    Args:
      state: any tree. In the states of this library's optimizers what is common is
        known; outside of them numbers without an axis are, and all else is rows. A
        transformation's state of :func:`lift` counts as an inner optimizer's if it is
        Optax's or Dion's. If it is another's, its floating-point numbers are averaged.
      mesh: with the new number of replicas. Within a replica arrays are sharded as they
        were, if it has the axes.

    Returns:
      The state with rows of the new number.

    Raises:
      ValueError: if the new number is no multiple or divisor of the old one, if arrays
        have rows in different numbers, or if `mesh` is None.

    Example:
      >>> from curvadion_jax import replicas
      >>> state = {"w": jnp.array([[1.0], [2.0]]), "step": jnp.array(5)}
      >>> state = replicas.resize(state, replicas.simulated(1))
      >>> state["w"].tolist(), int(state["step"])
      ([[1.5]], 5)
    """
    _rows.check_mesh(mesh)
    if mesh is None:
        raise ValueError("resize needs a mesh, from make_mesh or simulated.")
    replicas = _rows.count(mesh)
    old = _number_of_rows(state)
    if replicas > old:
        _keys.warn_of_raw_keys(state, (old,), "resize")

    def resized(x, kind):
        is_row = kind != "common"
        new = resized_rows(x, replicas=replicas, kind=kind) if is_row else x
        return _placed(new, x, mesh, is_row)

    new = jax.tree.map(resized, state, row_kinds(state))
    return _trees.shared_as(state, new)


def _number_of_rows(state: Any) -> int:
    """The number of rows, of which all arrays have as many; 0 without any."""
    kinds = jax.tree.leaves(row_kinds(state))
    found: dict[tuple[int, ...], str] = {}
    pairs = zip(jax.tree.leaves_with_path(state), kinds, strict=True)
    for (path, x), kind in pairs:
        if kind != "common":
            found.setdefault(jnp.shape(x)[:1], jax.tree_util.keystr(path))
    if len(found) > 1 or () in found:
        shown = [f"{path} has {length}" for length, path in found.items()]
        raise ValueError(
            f"Rows are in different numbers: {', '.join(shown[:3])}. Resize what has a "
            "row for each replica, and leave out what is common to all."
        )
    return next(iter(found), (0,))[0]


def row_kinds(state: Any) -> Any:
    """For every leaf of a state "common", or how its rows are resized.

    That is "average", "copy" where a mean would mean nothing, or "forget".
    """
    common = lambda tree: jax.tree.map(lambda x: "common", tree)
    of_rows = lambda x, kind: kind if jnp.ndim(x) else "common"
    copied = lambda tree: jax.tree.map(lambda x: of_rows(x, "copy"), tree)

    def averaged(tree):
        kind = lambda x: "average" if _finite.is_float(x) else "copy"
        return jax.tree.map(lambda x: of_rows(x, kind(x)), tree)

    def of_inner(tree):
        # `average_factors` acts on the mean of Dion's momenta, which stays. (Columns of
        # Q may have opposite signs, and cancel in a mean.)
        of_dion = lambda x: copied(x)._replace(momentum=averaged(x.momentum))
        is_dion = lambda node: isinstance(node, DionState)
        kinds = lambda node: of_dion(node) if is_dion(node) else copied(node)
        return jax.tree.map(kinds, tree, is_leaf=is_dion)

    def of_state(node):
        if not isinstance(node, AdaptiveSyncState):
            return of_inner(node) if is_inner(node) else averaged(node)
        counters = jax.tree.map(
            lambda x: "copy" if jnp.ndim(x) == 1 else "common", node.counters
        )
        # Means of parameters have another checksum. (nnx keeps it in a variable.)
        forget = jax.tree.map(lambda _: "forget", node.counters.checksum)
        counters = counters._replace(checksum=forget, moved_checksum=forget)
        rows = Rows(
            before_state=copied(node.rows.before_state),
            inner_state=of_inner(node.rows.inner_state),
            remembered=copied(node.rows.remembered),
            residual=averaged(node.rows.residual),
            weight=averaged(node.rows.weight),
        )
        return AdaptiveSyncState(common(node.common), rows, counters)

    def is_inner(node):  # of a lifted transformation
        is_optax = type(node).__module__.partition(".")[0] == "optax"
        is_state = isinstance(node, DionState) or (isinstance(node, tuple) and is_optax)
        return is_state and not _trees.nodes_of(AdaptiveSyncState, node)

    is_state = lambda node: isinstance(node, AdaptiveSyncState) or is_inner(node)
    return jax.tree.map(of_state, state, is_leaf=is_state)


def _placed(x: Any, like: Any, mesh: Replicas, is_row: bool) -> Any:
    """Moves an array to the mesh, sharded and in the memory as another one was."""
    old = getattr(like, "sharding", None)
    if not isinstance(mesh, Mesh):
        return x if old is None else _memory.to_memory_of(x, like)
    spec = old.spec if isinstance(old, NamedSharding) else P()
    inner = [entry if entry != AXIS else None for entry in spec]
    if not set(jax.tree.leaves(tuple(inner))) <= set(mesh.shape):
        inner = []
    if is_row:
        inner = [AXIS, *inner[1:]]
    sharding = NamedSharding(mesh, P(*inner))
    if old is not None:
        sharding = sharding.with_memory_kind(str(old.memory_kind))
    # One at a time: on a CPU of few cores many small programs that communicate wait
    # for each other, until XLA aborts.
    return jax.block_until_ready(_memory.put(x, sharding))


@functools.partial(jax.jit, static_argnames=("replicas", "kind"))
def resized_rows(x: jax.Array, *, replicas: int, kind: str) -> jax.Array:
    """Changes the number of rows of one array, [old, ...] -> [replicas, ...]."""
    old = len(x)
    if old == replicas:
        return x
    if old % replicas and replicas % old:
        raise ValueError(
            f"A state of {old} replicas cannot become one of {replicas}. Choose a "
            f"multiple or a divisor of {old}."
        )
    if kind == "forget":
        return jnp.zeros((replicas, *x.shape[1:]), x.dtype)
    x = _memory.to_device(x)
    if _trees.is_key(x) and replicas > old:
        split = _keys.split_keys(x, replicas // old)  # [copies, old, ...]
        return jnp.swapaxes(split, 0, 1).reshape(replicas, *x.shape[1:])
    first = np.arange(replicas) * old // replicas
    if kind == "copy" or replicas > old:
        return x[first]
    wide = _dtypes.at_least_float32(x)
    groups = wide.reshape(replicas, old // replicas, *x.shape[1:])
    finite = jnp.all(jnp.isfinite(groups), tuple(range(2, groups.ndim)), keepdims=True)
    # From the first of each group that is finite, so that equal replicas give their own
    # value. Where none is, the first stays: the best loss so far may be infinite.
    base = jnp.take_along_axis(groups, jnp.argmax(finite, 1, keepdims=True), axis=1)
    offsets = jnp.where(finite, groups - base, 0)
    number = jnp.maximum(jnp.sum(finite, axis=1), 1)
    return (base[:, 0] + jnp.sum(offsets, axis=1) / number).astype(x.dtype)
