"""Gives each device of a replica some whole matrices of those that are sharded.

An orthonormal basis needs a whole matrix. Left to itself, the compiler would gather
every matrix on every device. Here each device gets some of the matrices, by
all-to-alls inside the replica, and the results go back the same way. Of four matrices
A to D, with rows over the axis "fsdp" and columns over "tensor", on 2 x 2 devices:

================= ================== ================ =====================
device            a quarter of each  after "fsdp"     after "tensor", whole
================= ================== ================ =====================
fsdp 0, tensor 0  A B C D, top left  A B, left half   A
fsdp 0, tensor 1  A B C D, top right A B, right half  B
fsdp 1, tensor 0  A B C D, low left  C D, left half   C
fsdp 1, tensor 1  A B C D, low right C D, right half  D
================= ================== ================ =====================
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax._matrix_view import MatrixView, Named
from curvadion_jax.mesh._layout import Layout


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
    if layout.is_divided:
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
            whole.append(_gathered(jnp.concatenate(stacks), kind, axes))
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


def _gathered(stack: jax.Array, kind: _Kind, axes: Mapping[str, int]) -> jax.Array:
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
    """The inverse of `_gathered`, with its padding at the end."""
    for axis, name in reversed(kind.moves):
        stack = lax.all_to_all(stack, name, split_axis=axis, concat_axis=0, tiled=True)
    if shared := kind.shared(axes):
        stack = lax.all_gather(stack, shared, tiled=True)
    return stack
