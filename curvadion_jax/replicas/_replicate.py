"""Makes rows of a state and of batches, and places what is common."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _trees
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._rows import AXIS, Replicas, Simulated
from curvadion_jax.replicas import _keys


def replicate(tree: Any, mesh: Replicas) -> Any:
    """Gives every array a row for each replica, all of them alike.

    Random keys (`jax.random.key`) are split, so that every replica draws its own
    numbers. Those of `jax.random.PRNGKey` are numbers like others: split them first.

    Args:
      tree: what differs between replicas once they train: parameters, statistics of
        batch norm, the keys of an nnx model's dropout. What is common, such as a step
        number, needs no rows.
      mesh: from :func:`make_mesh` or :func:`simulated`. None returns the arrays as they
        are.

    Returns:
      The tree with leaves [R, ...]. On a mesh each replica has its own row; an array
      that is sharded over other axes of this mesh stays so within each replica, and one
      that lies elsewhere, such as a restored array, is copied.

    Raises:
      TypeError: if `mesh` is no mesh.
      ValueError: if an array is sharded over the replica axis already.
      OverflowError: if an integer needs 64 bits, and JAX has 32.

    Example:
      >>> from curvadion_jax.replicas import simulated
      >>> replicate({"w": jnp.ones(3)}, simulated(2))["w"].tolist()
      [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    _rows.check_mesh(mesh)
    for x in jax.tree.leaves(tree):
        _check_fits(x)
    if mesh is None:
        return _trees.shared_as(tree, jax.tree.map(jnp.asarray, tree))
    replicas = _rows.count(mesh)
    _keys.warn_of_raw_keys(tree, (), "replicate")

    def broadcast(x):
        if _trees.is_key(x):
            return _keys.split_keys(x, replicas)
        x = jnp.broadcast_to(x, (replicas, *jnp.shape(x)))
        # A weakly typed number would change its type on the first step.
        return jnp.asarray(x, x.dtype)

    copy = lambda tree: jax.tree.map(broadcast, tree)
    if isinstance(mesh, Simulated):
        return _trees.shared_as(tree, jax.jit(copy)(tree))

    def sharding(x):
        inner = getattr(x, "sharding", None)
        if isinstance(inner, NamedSharding) and inner.mesh == mesh:
            return NamedSharding(mesh, P(AXIS, *inner.spec))
        return NamedSharding(mesh, P(AXIS))

    moved = jax.tree.map(lambda x: _on_mesh(x, mesh), tree)
    rows = jax.jit(copy, out_shardings=jax.tree.map(sharding, moved))(moved)
    return _trees.shared_as(tree, rows)


def _check_fits(x: Any) -> None:
    """Rejects integers of NumPy of which JAX would take 32 bits, without a word."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "iu":
        return
    there = jnp.iinfo(jnp.result_type(x))
    if x.size and (x.min() < there.min or x.max() > there.max):
        raise OverflowError(
            f"{x!r:.80} needs {x.dtype}, and JAX has {there.dtype} in its place. Keep "
            "it out of the state, or set jax_enable_x64."
        )


def _on_mesh(x: Any, mesh: Mesh) -> Any:
    """Moves an array of one replica to this mesh.

    Checkpoints are restored to one device, and Flax (0.12.8) wants one type of axes.
    """
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    if _rows.has_rows(x):
        raise ValueError(
            f"An array of shape {x.shape} is sharded over {AXIS!r} already. Give "
            "replicate the arrays of one replica, once."
        )
    if sharding is None or isinstance(x, Tracer) or not x.committed:
        return x
    sizes = {axis: sharding.mesh.shape[axis] for axis in _rows.named_axes(spec)}
    if any(mesh.shape.get(axis) != size for axis, size in sizes.items()):
        spec = P()
    return _on_devices(x, NamedSharding(mesh, spec))


def _on_devices(x: Any, place: NamedSharding) -> Any:
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if place.mesh.is_multi_process and not is_global:
        # Every process has the value. `device_put` would refuse the arrays of one
        # process, and compare those of the hosts, by a message.
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])
    return jax.device_put(x, place)


def place(tree: Any, mesh: Replicas) -> Any:
    """Copies numbers and arrays that are on no mesh yet to all devices of this one.

    Such as the step number of a Flax `TrainState`. Without it the second call of a step
    compiles again, for arrays of other types.

    Args:
      tree: any tree, such as a whole training state. Arrays on the mesh stay.
      mesh: as for :func:`replicate`. Without devices to copy to, on `simulated` and
        None, numbers become arrays all the same.

    Returns:
      The tree, with arrays in place of numbers, in their own dtypes.

    Raises:
      TypeError: if `mesh` is no mesh.
      OverflowError: if an integer needs 64 bits, and JAX has 32.

    Example:
      >>> from curvadion_jax.replicas import make_mesh
      >>> place({"step": 0}, make_mesh(1))["step"].sharding.is_fully_replicated
      True
    """
    _rows.check_mesh(mesh)

    def common(x):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return x
        _check_fits(x)
        # Not weakly typed: what a checkpoint restores is not.
        x = jnp.asarray(x, jnp.result_type(x))
        if not isinstance(mesh, Mesh):
            return x
        everywhere = NamedSharding(mesh, P())
        if not isinstance(x, Tracer) and x.committed:  # as after a restore
            x = _on_devices(x, everywhere)
        # A copy, which may be donated.
        return jax.jit(jnp.array, out_shardings=everywhere)(x)

    return _trees.shared_as(tree, jax.tree.map(common, tree))


def split(batch: Any, mesh: Replicas, spec: P | None = None) -> Any:
    """Divides a global batch [R * n, ...] into one of each replica, [R, n, ...].

    Args:
      batch: tree of arrays with one number of examples, on the host or the device;
        another library's tensors become NumPy's arrays. With several processes each has
        all of it, and places its replicas' part. An array that indexes another one,
        such as the senders of a graph, would still index the whole batch. Examples are
        on the first axis: of a time-major batch [T, R * n] move that axis first, or
        time is divided.
      mesh: as for :func:`replicate`. None returns the batch as it is.
      spec: how the devices of one replica share its batch [n, ...], such as
        ``PartitionSpec("fsdp")``; with ``PartitionSpec()`` each of them has all of it.
        None means that, too, and warns if a replica has several devices. Under jit the
        compiler places the batch, and `spec` says nothing.

    Returns:
      The tree with leaves [R, n, ...], each replica's on its own devices.

    Raises:
      TypeError: if `mesh` is no mesh.
      ValueError: if an array has no equal number of examples for each replica, such as
        a single number, which has none; if arrays have different numbers of examples,
        as where one is a table that all replicas need.

    Example:
      >>> from curvadion_jax.replicas import simulated
      >>> split({"x": jnp.arange(4)}, simulated(2))["x"].tolist()
      [[0, 1], [2, 3]]
    """
    _rows.check_mesh(mesh)
    if mesh is None:
        return batch
    replicas = _rows.count(mesh)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(batch))
    if spec is None and not traced and (axes := _rows.inner_axes(mesh)):
        warnings.warn(
            f"Each device of a replica ({axes}) gets its whole batch, and may repeat "
            "the work of the others. Pass split(batch, mesh, PartitionSpec("
            f"{next(iter(axes))!r})) to share it, or PartitionSpec() if this is meant.",
            stacklevel=2,
        )
    place = None
    if isinstance(mesh, Mesh):
        place = NamedSharding(mesh, P(AXIS, *(spec or ())))

    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    batch = jax.tree.map(lambda x: x if is_array(x) else np.asarray(x), batch)
    _check_examples(batch)

    def divide(path, x):
        shape = x.shape
        if not shape or shape[0] % replicas or not shape[0]:
            hint = f"Give a number of examples that is a multiple of {replicas}."
            if not shape:
                hint = "Pass a single number to what replicas.map returns, by keyword."
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {shape}, which cannot be "
                f"divided among {replicas} replicas. {hint}"
            )
        x = x.reshape(replicas, shape[0] // replicas, *shape[1:])
        if place is None or isinstance(x, Tracer):
            return x
        return _on_devices(x, place)

    return jax.tree.map_with_path(divide, batch)


def _check_examples(batch: Any) -> None:
    """Rejects an array with another number of examples than most have.

    Cut among the replicas, a table of class weights or positions would be indexed
    beyond its end, where JAX takes the last row without a word.
    """
    shapes = {
        jax.tree_util.keystr(path): x.shape
        for path, x in jax.tree.leaves_with_path(batch)
        if x.shape
    }
    lengths = collections.Counter(shape[0] for shape in shapes.values())
    if len(lengths) > 1:
        usual, _ = lengths.most_common(1)[0]
        odd = [f"batch{p} of shape {x}" for p, x in shapes.items() if x[0] != usual]
        raise ValueError(
            f"Arrays of the batch have {usual} examples, but not {', '.join(odd[:3])}. "
            "Pass what is common to all replicas by keyword to what replicas.map "
            "returns, and split another list of examples by itself."
        )
