"""Changes the number of rows of a state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _dtypes, _finite, _memory, _rows, _trees
from curvadion_jax._dion import DionState
from curvadion_jax._rows import AXIS, Replicas
from curvadion_jax._sync_state import AdaptiveSyncState
from curvadion_jax.replicas import _keys


def resize(state: Any, mesh: Replicas) -> Any:
    """Changes the number of replicas of a state to a multiple or a divisor of it.

    With fewer replicas, each new one gets the mean of k neighbours' floating-point
    numbers, and all else (integers, keys, Dion's Q, what a trigger remembers) of the
    first of them. With more, each is copied k times, but random keys are split. What is
    common stays.

    With several processes save and restore a checkpoint instead,
    ``checkpoint.restore(directory, target, resize=True)``.

    Args:
      state: any tree. In the states of this library's optimizers what is common is
        known; outside of them numbers without an axis are, and all else is rows.
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

    return jax.tree.map(resized, state, row_kinds(state))


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

    def of_rows(tree, copied=False):
        def kind(x):
            return "average" if _finite.is_float(x) and not copied else "copy"

        return jax.tree.map(kind, tree)

    common = lambda tree: jax.tree.map(lambda x: "common", tree)

    is_dion = lambda node: isinstance(node, DionState)

    def of_inner(node):
        kinds = of_rows(node)
        if not is_dion(node):
            return kinds
        # Columns of Q may have opposite signs, and cancel in a mean.
        return kinds._replace(dion_q=of_rows(node.dion_q, copied=True))

    def of_state(node):
        if is_dion(node):  # lifted
            return of_inner(node)
        if not isinstance(node, AdaptiveSyncState):
            return "common" if jnp.ndim(node) == 0 else of_rows(node)
        counters = jax.tree.map(
            lambda x: "copy" if jnp.ndim(x) == 1 else "common", node.counters
        )
        # Means of parameters have another checksum.
        counters = counters._replace(checksum="forget")
        rows = of_rows(node.rows)._replace(
            inner_state=jax.tree.map(of_inner, node.rows.inner_state, is_leaf=is_dion),
            remembered=of_rows(node.rows.remembered, copied=True),
        )
        return AdaptiveSyncState(
            common=common(node.common), rows=rows, counters=counters
        )

    is_state = lambda node: isinstance(node, AdaptiveSyncState | DionState)
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


def _resized(x: jax.Array, replicas: int, kind: str) -> jax.Array:
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
    # From the first of each group, so that equal replicas give their own value.
    base = groups[:, 0]
    mean = base + jnp.mean(groups - groups[:, :1], axis=1)
    # The best loss so far may be infinite, and infinity less infinity is NaN.
    return jnp.where(jnp.isfinite(base), mean, base).astype(x.dtype)


resized_rows = jax.jit(_resized, static_argnames=("replicas", "kind"))
