"""How the arrays of one replica are divided between its devices.

Inside a step nobody can see it: axes inside a replica are automatic, and the compiler
divides the work. That is what matrix products and arithmetic by elements want. What
cuts an array into blocks wants it otherwise: the compiler would first gather the array
on every device. So `replicas.step`, which sees how the state is divided, notes it here
while the step is traced.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from curvadion_jax import _paths


class Placed(NamedTuple):
    """An array of the state: its path, its shape in one replica, and how it lies."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec


_NOTHING_NOTED = (
    "a sync of replicas of several devices cannot see how the state is divided between "
    "them: every device gathers whole arrays and sends all of them. Call the function "
    "that curvadion_jax.replicas.step returns with arrays on its mesh (or "
    "jax.ShapeDtypeStruct with a sharding), before any other trace of the same jitted "
    "functions in it"
)

_noted: contextvars.ContextVar[tuple[Placed, ...]] = contextvars.ContextVar(
    "noted", default=()
)


def inner_axes() -> dict[str, int]:
    """Axes inside a replica, where this is traced, and their sizes.

    Automatic ones of several devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return {}
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto = [axis for axis, kind in types if kind == AxisType.Auto]
    return {axis: mesh.shape[axis] for axis in auto if mesh.shape[axis] > 1}


def keep_whole(factor: jax.Array) -> jax.Array:
    """A factor [..., r] with r whole on every device, inside a replica.

    With factors divided along r, by an axis that divides the matrix, the compiler
    gathers the matrix for their product, or adds up products of its size.
    """
    if not inner_axes():
        return factor
    others = [PartitionSpec.UNCONSTRAINED] * (factor.ndim - 1)
    return lax.with_sharding_constraint(factor, PartitionSpec(*others, None))


@contextlib.contextmanager
def noting(arrays: Sequence[Placed]) -> Iterator[None]:
    """Lets `specs` know these arrays."""
    token = _noted.set(tuple(arrays))
    try:
        yield
    finally:
        _noted.reset(token)


@contextlib.contextmanager
def noting_made_of(
    paths: Sequence[str],
    arrays: Sequence[jax.Array],
    made_of: Sequence[tuple[tuple[int, ...], Sequence[tuple[int, ...]]]],
) -> Iterator[None]:
    """Lets `specs` know arrays that are made of parameters, such as factors.

    Args:
      paths: those of the parameters.
      arrays: one for each.
      made_of: for each the shape of the parameter, and for every axis of the array the
        axes of the parameter that it is made of.
    """
    known = []
    for path, x, (shape, axes) in zip(paths, arrays, made_of, strict=True):
        if (spec := _by_path(path, shape)) is not None:
            by_axis = (*spec, *[None] * (len(shape) - len(spec)))
            known.append(Placed(path, x.shape, PartitionSpec(*of_axes(by_axis, axes))))
    with noting([*known, *_noted.get()]):
        yield


def check_noted() -> None:
    """Warns where `specs` knows no arrays at all."""
    if not _noted.get():
        warnings.warn(_NOTHING_NOTED, stacklevel=2)


def specs(
    tree: Any, axes: Iterable[str], *, by_shape: bool = True
) -> list[PartitionSpec | None]:
    """How the arrays of a tree like the parameters are divided over axes, leaf by leaf.

    As an array of the state whose path ends with the leaf's, of the same shape; else
    by_shape as any of that shape; None where that is not known.
    """
    found = []
    for path, leaf in _paths.leaves_with_path(tree):
        spec = _by_path(path, leaf.shape)
        if spec is None and by_shape:
            alike = (x.spec for x in _noted.get() if x.shape == leaf.shape)
            spec = next(alike, None)
        found.append(None if spec is None else _over(spec, axes))
    return found


def _by_path(path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    for each in _noted.get():
        if each.shape == shape and f"/{each.path}".endswith(f"/{path}"):
            return each.spec
    return None


def _over(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """What of a division is over these axes."""

    def kept(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in axes)
        return (names[0] if len(names) == 1 else names) or None

    return PartitionSpec(*map(kept, spec))


def named_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that divide an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def of_axes(by_axis: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """What holds for the parameter's axes, for axes that are made of those.

    Of several axes the first may be divided, and none behind it.
    """
    return [
        None if not of or any(by_axis[axis] for axis in of[1:]) else by_axis[of[0]]
        for of in axes
    ]


def place_like(
    x: jax.Array, parameter: Any, axes: Sequence[tuple[int, ...]]
) -> jax.Array:
    """An array placed as a parameter is, outside of a compiled function.

    Args:
      x: the array.
      parameter: what to follow; x is left where it is unless this lies on a mesh.
      axes: for every axis of x the axes of the parameter that it is made of, in order;
        none for an axis that is to stay whole.
    """
    if isinstance(parameter, Tracer) or not isinstance(parameter, jax.Array):
        return x
    if not isinstance(parameter.sharding, NamedSharding):
        return x
    mesh, spec = parameter.sharding.mesh, parameter.sharding.spec
    by_axis = (*spec, *[None] * (parameter.ndim - len(spec)))
    placement = NamedSharding(mesh, PartitionSpec(*of_axes(by_axis, axes)))
    if placement.is_fully_addressable:
        return jax.device_put(x, placement)
    # For `device_put` all processes would compare their arrays, one message for each.
    return jax.jit(lambda x: x, out_shardings=placement)(x)


def like_tree(
    params: Any, arrays: Sequence[Any], axes: Sequence[Sequence[tuple[int, ...]]]
) -> Any:
    """Arrays in the structure of the parameters, each placed as its parameter.

    Where linen's boxes name the axes of the parameters, those of the arrays are named
    alike, so that `flax.linen.get_partition_spec` divides them in the same way.
    """
    nodes, structure = jax.tree.flatten(params, is_leaf=_paths.is_box)
    following = zip(arrays, axes, strict=True)

    def placed(node):
        leaves, inside = jax.tree.flatten(node)  # none where another optimizer takes it
        pairs = [(leaf, *next(following)) for leaf in leaves]
        new = [place_like(x, leaf, of) for leaf, x, of in pairs]
        box = jax.tree.unflatten(inside, new)
        if not _paths.is_box(node) or len(pairs) != 1:
            return box
        return _with_names(box, len(leaves[0].shape), pairs[0][-1])

    return structure.unflatten([placed(node) for node in nodes])


def _with_names(box: Any, ndim: int, axes: Sequence[tuple[int, ...]]) -> Any:
    """Flax's box of an array made of a parameter's axes, which it has the names of."""

    def renamed(names):
        known = isinstance(names, tuple | list) and len(names) == ndim
        return tuple(of_axes(names, axes)) if known else names

    if hasattr(box, "set_metadata"):  # a variable of nnx
        metadata = box.get_metadata()
        for key in {"out_sharding", "sharding_names", "sharding"} & set(metadata):
            box.set_metadata(key, renamed(metadata[key]))
        return box
    if getattr(box, "names", None) is None:
        return box
    return box.replace(names=renamed(box.names))
