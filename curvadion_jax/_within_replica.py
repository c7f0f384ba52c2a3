"""Moves data between the devices of one replica, and never to another replica.

`by_device` lets every device work on its own parts of arrays, `by_matrix` on some whole
matrices of a stack; `bases` makes the bases of Dion's left factors that way.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from curvadion_jax import _orthonormalize
from curvadion_jax._layout import Layout, named_axes
from curvadion_jax._matrices import MatrixView, Named, make_view

# Elements per device. Every device sends a smaller array whole, because joining its
# pieces again takes another message inside the replica.
_LEAST_PIECE = 256


def shared_by(x: Any, spec: PartitionSpec, layout: Layout) -> tuple[str, ...]:
    """Inner axes whose devices hold the same part, of which each takes a piece."""
    named = named_axes(spec)
    enough = x.size >= layout.devices * _LEAST_PIECE
    return tuple(axis for axis in layout.axes if enough and axis not in named)


def parts(tree: Any, layout: Layout) -> Any:
    """The shapes of what `by_device` gives each device of a tree of arrays."""
    if not layout.axes:
        return tree
    mesh = AbstractMesh(tuple(layout.axes.values()), tuple(layout.axes))

    def part(x, spec):
        shape = NamedSharding(mesh, spec).shard_shape(x.shape)
        if shared := shared_by(x, spec, layout):
            devices = math.prod(layout.axes[axis] for axis in shared)
            shape = (math.ceil(math.prod(shape) / devices),)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(part, leaves, layout.of(tree)))


def by_device(
    function: Callable[[list[jax.Array]], list[tuple[jax.Array, ...]]],
    tree: Any,
    layout: Layout,
) -> list[tuple[jax.Array, ...]]:
    """Calls a function on every device's own parts of arrays, and joins the results.

    The function returns a tuple of arrays like each part, and is called once for all
    arrays that are sharded over the same axes. If several devices hold the same part,
    each call is given another piece of it, in one dimension.
    """
    leaves = jax.tree.leaves(tree)
    specs = layout.of(tree)
    together = defaultdict(list)
    for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        together[named_axes(spec), shared_by(leaf, spec, layout)].append(index)
    results: list[Any] = [None] * len(leaves)
    for (_, shared), members in together.items():
        sharded = [specs[index] for index in members]
        mapped = jax.shard_map(
            functools.partial(_of_pieces, function, shared) if shared else function,
            in_specs=(sharded,),
            out_specs=sharded,
            axis_names=set(layout.axes),
            check_vma=False,
        )
        found = mapped([leaves[index] for index in members])
        for index, each in zip(members, found, strict=True):
            results[index] = each
    return results


def _of_pieces(function, shared: tuple[str, ...], parts: list) -> list:
    """Calls a function on this device's pieces of parts that `shared` axes share."""
    devices = lax.axis_size(shared)

    def piece(x):
        pieces = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index(shared), keepdims=False)

    def joined(found, x):
        whole = lax.all_gather(found, shared, tiled=True)
        return whole[: x.size].reshape(x.shape)

    results = zip(function([piece(x) for x in parts]), parts, strict=True)
    return [tuple(joined(found, x) for found in result) for result, x in results]


class _Kind(NamedTuple):
    """What matrices of one stack have in common."""

    shape: tuple[int, int]  # of a matrix, (fan_in, fan_out)
    sharded: tuple[tuple[str, ...], ...]  # mesh axes, for both sides of a matrix
    stacked: frozenset[str]  # mesh axes that shard the stack itself
    dtype: Any

    @property
    def moves(self) -> list[tuple[int, str]]:
        """Axes of a stack, and the mesh axes over which they are gathered."""
        pairs = enumerate(self.sharded, start=1)
        return [(axis, name) for axis, names in pairs for name in reversed(names)]

    def shared(self, axes: Mapping[str, int]) -> tuple[str, ...]:
        """Mesh axes whose devices hold the same matrices."""
        named = self.stacked.union(*self.sharded)
        return tuple(axis for axis in axes if axis not in named)


def _kind(view: MatrixView, spec: PartitionSpec, dtype: Any) -> _Kind:
    entries = dict(enumerate(spec))
    names = lambda axes: tuple(jax.tree.leaves([entries.get(axis) for axis in axes]))
    sides = names(view.fan_in_axes), names(view.fan_out_axes)
    stacked = frozenset(names(view.batch_axes))
    return _Kind((view.fan_in, view.fan_out), sides, stacked, dtype)


def by_matrix(
    function: Callable[[list[jax.Array]], list[jax.Array]],
    arrays: Mapping[str, jax.Array],
    views: Mapping[str, MatrixView],
    layout: Layout,
    fewest: float = 1.0,
) -> Named:
    """Applies a function of stacks of matrices to arrays, by the paths of parameters.

    Inside a replica of several devices each of them gets some of the matrices, whole,
    and the results go back to where the matrices were. That takes two all-to-alls for
    every axis that shards matrices. The compiler divides the function's work if fewer
    than `fewest` a device are sharded alike.

    The function maps stacks [number, fan_in, fan_out] to arrays of their shapes, each
    matrix by itself. It must commute with permutations of rows, and of columns if they
    merge sharded axes. A stack may be padded with copies of its last matrix.
    """
    results = {}
    if layout.axes:
        specs = {path: layout.specs.get(path, PartitionSpec()) for path in arrays}
        kinds = defaultdict(list)
        for path, spec in specs.items():
            kinds[_kind(views[path], spec, arrays[path].dtype)].append(path)
        enough = fewest * layout.devices
        moved = {
            kind: paths
            for kind, paths in kinds.items()
            if sum(math.prod(views[path].batch) for path in paths) >= enough
        }
        if moved:
            results = _moved(function, moved, arrays, views, specs, layout)
    rest = [path for path in arrays if path not in results]
    stacks = [views[path].to_stack(arrays[path]) for path in rest]
    for path, stack in zip(rest, function(stacks), strict=True):
        results[path] = views[path].from_stack(stack, arrays[path].shape)
    return results


def _moved(function, kinds: Mapping[_Kind, list[str]], arrays, views, specs, layout):
    """Applies the function to whole matrices, some of them on each device."""
    axes = layout.axes
    sharded = {path: specs[path] for paths in kinds.values() for path in paths}

    def of_parts(parts):
        whole, results = [], {}
        for kind, paths in kinds.items():
            stacks = [views[path].to_stack(parts[path]) for path in paths]
            whole.append(_together(jnp.concatenate(stacks), kind, axes))
        for (kind, paths), stack in zip(kinds.items(), function(whole), strict=True):
            stack = _apart(stack, kind, axes)
            for path in paths:
                view, shape = views[path], parts[path].shape
                number = math.prod(shape[axis] for axis in view.batch_axes)
                own, stack = stack[:number], stack[number:]
                results[path] = view.from_stack(own, shape)
        return results

    mapped = jax.shard_map(
        of_parts,
        in_specs=(sharded,),
        out_specs=sharded,
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped({path: arrays[path] for path in sharded})


def _together(stack: jax.Array, kind: _Kind, axes: Mapping[str, int]) -> jax.Array:
    """Turns shards of every matrix into whole matrices; pads by repetition."""
    shared, moves = kind.shared(axes), kind.moves
    pieces = math.prod(axes[name] for name in (*shared, *(name for _, name in moves)))
    padding = [(0, -len(stack) % pieces), *[(0, 0)] * (stack.ndim - 1)]
    stack = jnp.pad(stack, padding, mode="edge")
    if shared:
        count = len(stack) // lax.axis_size(shared)
        start = count * lax.axis_index(shared)
        stack = lax.dynamic_slice_in_dim(stack, start, count)
    for axis, name in moves:
        stack = lax.all_to_all(stack, name, split_axis=0, concat_axis=axis, tiled=True)
    return stack


def _apart(stack: jax.Array, kind: _Kind, axes: Mapping[str, int]) -> jax.Array:
    """The inverse of `_together`, with its padding at the end."""
    for axis, name in reversed(kind.moves):
        stack = lax.all_to_all(stack, name, split_axis=axis, concat_axis=0, tiled=True)
    if shared := kind.shared(axes):
        stack = lax.all_gather(stack, shared, tiled=True)
    return stack


def by_shape(
    function: Callable[[jax.Array], jax.Array],
    stacks: list[jax.Array],
    largest: int | None = None,
) -> list[jax.Array]:
    """Calls a function of stacks once for all stacks of one shape of matrices.

    With a call for every parameter the program would grow with the layers. Joining
    copies, so with `largest` a call takes about that many elements, and only single
    matrices are joined: a stack of layers may be sharded along the layers.
    """
    calls, sizes = defaultdict(list), defaultdict(int)
    for index, x in enumerate(stacks):
        kind: Any = (x.shape[1:], x.dtype, jax.typeof(x).sharding.spec)
        if largest is not None and len(x) > 1:
            kind = index
        part = sizes[kind] // largest if largest else 0
        calls[kind, part].append(index)
        sizes[kind] += x.size
    results = {}
    for call in calls.values():
        arrays = [stacks[index] for index in call]
        whole = jnp.concatenate(arrays) if len(call) > 1 else arrays[0]
        ends = np.cumsum([len(x) for x in arrays])[:-1]
        parts = jnp.split(function(whole), ends)
        results |= dict(zip(call, parts, strict=True))
    return [results[index] for index in range(len(stacks))]


def bases(factors: Named, views: Mapping[str, MatrixView], layout: Layout) -> Named:
    """Orthonormal bases of left factors; each device of a replica makes some of them.

    Left to itself, the compiler makes all of them on every device where an axis shards
    the matrix along its other side. `views` and `layout` are the parameters'.
    """
    made_of = {name: (view.shape, view.p_axes) for name, view in views.items()}
    found = by_matrix(
        lambda stacks: by_shape(_orthonormalize.cholesky_qr, stacks),
        factors,
        {name: make_view(x.shape, -2, -1) for name, x in factors.items()},
        layout.of_factors(factors, made_of),
    )
    return {name: layout.keep_whole(found[name]) for name in factors}
