"""How the arrays of one replica are sharded over its devices.

Axes inside a replica are automatic in a step: arrays do not show how they are sharded,
and the compiler divides the work. That suits matrix products and elementwise
arithmetic, but it would gather an array that is cut into blocks. So `replicas.step`
notes how the state is sharded while the step is traced (`MappedStep.placed`).

Explicit axes (https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html) are part
of an array's type. A model may use them; the optimizer's update sees automatic ones.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvadion_jax import _memory, _paths
from curvadion_jax._matrices import MadeOf


class Placed(NamedTuple):
    """An array of the state: its path, its shape in one replica, and its sharding."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays of a replica are sharded over its devices.

    Attributes:
      axes: sizes of the mesh axes inside the replica; empty for one device.
      placed: arrays whose sharding is known.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    placed: tuple[Placed, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices of a replica."""
        return math.prod(self.axes.values())

    def specs(self, tree: Any) -> list[PartitionSpec | None]:
        """The sharding of each array of a tree like the parameters, None if unknown.

        It is that of the state's array of the same shape whose path ends in this one.
        """
        leaves = _paths.leaves_with_path(tree)
        known = [self._known.get((path, x.shape)) for path, x in leaves]
        return [None if spec is None else _over(spec, self.axes) for spec in known]

    def of_factors(
        self, factors: Mapping[str, jax.Array], made_of: Mapping[str, MadeOf]
    ) -> "Layout":
        """Adds factors to the layout, by the paths of their parameters."""
        known = []
        for path, x in factors.items():
            shape, axes = made_of[path]
            if (spec := self._known.get((path, shape))) is not None:
                spec = PartitionSpec(*of_axes(spec, axes))
                known.append(Placed(path, x.shape, spec))
        return dataclasses.replace(self, placed=(*known, *self.placed))

    def keep_whole(self, factor: jax.Array) -> jax.Array:
        """Leaves a factor [..., r] unsharded along r.

        Else, over an axis that also shards the matrix, the compiler would gather the
        matrix for their product, or add up products of its size.
        """
        if not self.axes:
            return factor
        others = [PartitionSpec.UNCONSTRAINED] * (factor.ndim - 1)
        return lax.with_sharding_constraint(factor, PartitionSpec(*others, None))

    @functools.cached_property
    def _known(self) -> dict[tuple[str, tuple[int, ...]], PartitionSpec]:
        """Shardings by ends of paths, and shapes; that of the shortest path."""
        found = {}
        for path, shape, spec in sorted(self.placed, key=lambda each: len(each.path)):
            names = path.split("/")
            for start in range(len(names) + 1):
                found.setdefault(("/".join(names[start:]), shape), spec)
        return found


ONE_DEVICE = Layout()


def current() -> Layout:
    """The layout inside a `shard_map` over the replicas, in which no array is known."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = _axes_of_type(mesh, AxisType.Auto) if mesh.manual_axes else ()
    return make_layout({axis: mesh.shape[axis] for axis in automatic})


def make_layout(axes: Mapping[str, int], placed: tuple[Placed, ...] = ()) -> Layout:
    """The layout of known arrays over mesh axes, some of which may have one device."""
    axes = {axis: size for axis, size in axes.items() if size > 1}
    return Layout(axes, placed) if axes else ONE_DEVICE


def _over(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Leaves out all but these mesh axes."""

    def kept(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in axes)
        return (names[0] if len(names) == 1 else names) or None

    return PartitionSpec(*map(kept, spec))


def named_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that shard an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def of_axes(spec: Iterable[Any], axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The sharding of an array that merges a parameter's axes, as far as it is known.

    Of several axes that are merged only the first may be sharded.
    """
    known = dict(enumerate(spec))
    return [
        None if not merged or any(map(known.get, merged[1:])) else known.get(merged[0])
        for merged in axes
    ]


def named_sharding(x: Any) -> NamedSharding | None:
    """How an array lies on a mesh; None if on no mesh, or if it is being traced."""
    sharding = getattr(x, "sharding", None)
    is_named = isinstance(sharding, NamedSharding) and not isinstance(x, Tracer)
    return sharding if is_named else None


def place_like(
    x: jax.Array, parameter: Any, axes: Sequence[tuple[int, ...]]
) -> jax.Array:
    """Shards an array that merges a parameter's axes (see `of_axes`) as the parameter.

    Unchanged if the parameter is on no mesh, or is being traced.
    """
    if (sharding := named_sharding(parameter)) is None:
        return x
    placement = NamedSharding(
        sharding.mesh, PartitionSpec(*of_axes(sharding.spec, axes))
    )
    if placement.is_fully_addressable:
        return jax.device_put(x, placement)
    # For `device_put` all processes would compare their arrays, one message for each.
    return jax.jit(lambda x: x, out_shardings=placement)(x)


def boxed_like(x: jax.Array, node: Any, axes: Sequence[tuple[int, ...]]) -> Any:
    """Boxes an array that merges a parameter's axes as Flax boxed the parameter.

    The box names the array's axes, so that Flax shards it as it shards the parameter.
    """
    box = jax.tree.structure(node).unflatten([x])

    def renamed(names):
        known = isinstance(names, tuple | list)
        return tuple(of_axes(names, axes)) if known else names

    if hasattr(box, "set_metadata"):  # an nnx variable
        metadata = box.get_metadata()
        for key in {"out_sharding", "sharding_names", "sharding"} & set(metadata):
            box.set_metadata(key, renamed(metadata[key]))
    elif hasattr(box, "names"):
        box = box.replace(names=renamed(box.names))
    return box


def _axes_of_type(
    mesh: Mesh | jax.sharding.AbstractMesh, kind: AxisType
) -> tuple[str, ...]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, each in types if each == kind)


def explicit_specs(tree: Any, stacked: Any) -> Any:
    """The shardings of arrays over Explicit axes, without the replica axis.

    `stacked` tells which arrays have a leading replica axis.
    """

    def within(x, has_axis):
        return PartitionSpec(*jax.typeof(x).sharding.spec[int(has_axis) :])

    return jax.tree.map(within, tree, stacked)


def over_replicas(
    function: Callable[..., Any],
    mesh: Mesh,
    axis_name: str,
    in_specs: Any,
    like: Any,
    *,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps a function of one replica by `shard_map`, for stacked arrays.

    Inside, the axes of a replica are automatic: at the boundary of a `shard_map` over
    another axis JAX 0.10.2 gathers what is sharded over Explicit ones. `in_specs` are
    over the replica axis, and `like` has `explicit_specs` of the results.
    """
    automatic = dict.fromkeys(mesh.axis_names, AxisType.Auto)
    mapped = jax.shard_map(
        function,
        mesh=mesh.abstract_mesh.update_axis_types(automatic),
        in_specs=in_specs,
        out_specs=PartitionSpec(axis_name),
        axis_names={axis_name},
        check_vma=check_vma,
    )
    if not (explicit := _axes_of_type(mesh, AxisType.Explicit)):
        return mapped
    results = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(None, *spec)), like
    )
    return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=results)


def constrain(x: jax.Array, placement: NamedSharding | None) -> jax.Array:
    """Constrains the sharding of an array, over Explicit axes by its type."""
    if placement is None or placement.memory_kind == _memory.HOST_KIND:
        return x  # The type of an array in host memory keeps it there.
    if not (explicit := _axes_of_type(placement.mesh, AxisType.Explicit)):
        return lax.with_sharding_constraint(x, placement)
    typed = _over(placement.spec, explicit)
    free = [
        PartitionSpec.UNCONSTRAINED if in_type else entry
        for entry, in_type in zip(placement.spec, typed, strict=True)
    ]
    x = jax.sharding.reshard(x, placement.update(spec=typed))
    return lax.with_sharding_constraint(x, placement.update(spec=PartitionSpec(*free)))
