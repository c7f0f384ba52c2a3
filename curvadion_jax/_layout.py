"""How the arrays of one replica lie on its devices.

Axes inside a replica are automatic in a step: nobody sees how an array is sharded, and
the compiler divides the work. That suits matrix products and elementwise arithmetic,
but an array that is cut into blocks would be gathered first. So `replicas.step`, which
sees how the state lies, notes it while the step is traced (`noting`, `current`).

Explicit axes (https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html) are part
of an array's type. A model may use them; the optimizer's update sees automatic ones.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvadion_jax import _jax_internals, _memory, _paths
from curvadion_jax._matrices import MadeOf


class Placed(NamedTuple):
    """An array of the state: its path, its shape in one replica, and how it lies."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays of a replica are sharded over its devices, as far as it is known.

    Attributes:
      axes: mesh axes inside the replica, of several devices, and their sizes; empty for
        a replica of one device.
      placed: arrays whose place is known.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    placed: tuple[Placed, ...] = ()

    def specs(self, tree: Any) -> list[PartitionSpec | None]:
        """How each array of a tree like the parameters is sharded, None if unknown.

        That is taken from the array of the state whose shape is the leaf's and whose
        path ends with the leaf's path.
        """
        known = [self._by_path(p, x.shape) for p, x in _paths.leaves_with_path(tree)]
        return [None if spec is None else _over(spec, self.axes) for spec in known]

    def of_factors(
        self, factors: Mapping[str, jax.Array], made_of: Mapping[str, MadeOf]
    ) -> "Layout":
        """The layout of arrays made of parameters, by the parameters' paths."""
        known = []
        for path, x in factors.items():
            shape, axes = made_of[path]
            if (spec := self._by_path(path, shape)) is not None:
                spec = PartitionSpec(*of_axes(spec, axes))
                known.append(Placed(path, x.shape, spec))
        return dataclasses.replace(self, placed=(*known, *self.placed))

    def keep_whole(self, factor: jax.Array) -> jax.Array:
        """A factor [..., r], unsharded along r.

        With r sharded over an axis that also shards the matrix, the compiler gathers
        the matrix for their product, or adds up products of its size.
        """
        if not self.axes:
            return factor
        others = [PartitionSpec.UNCONSTRAINED] * (factor.ndim - 1)
        return lax.with_sharding_constraint(factor, PartitionSpec(*others, None))

    def _by_path(self, path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        for each in self.placed:
            if each.shape == shape and f"/{each.path}".endswith(f"/{path}"):
                return each.spec
        return None


ONE_DEVICE = Layout()

# `with noting(arrays):` lets `current` know how these lie, a tuple of `Placed`.
noting: Any = _jax_internals.user_context()


def current() -> Layout:
    """The layout where this is traced: inner axes of the mesh, and what was noted."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ONE_DEVICE
    automatic = _axes_of_type(mesh, AxisType.Auto)
    axes = {axis: mesh.shape[axis] for axis in automatic if mesh.shape[axis] > 1}
    return Layout(axes, noting.value or ()) if axes else ONE_DEVICE


def _over(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """The part of a sharding that is over these axes."""

    def kept(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in axes)
        return (names[0] if len(names) == 1 else names) or None

    return PartitionSpec(*map(kept, spec))


def named_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that shard an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def of_axes(spec: Iterable[Any], axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """A parameter's sharding as that of an array whose axes are made of its axes.

    Of several axes that are merged only the first may be sharded.
    """
    known = dict(enumerate(spec))
    return [
        None if not merged or any(map(known.get, merged[1:])) else known.get(merged[0])
        for merged in axes
    ]


def place_like(
    x: jax.Array, parameter: Any, axes: Sequence[tuple[int, ...]]
) -> jax.Array:
    """An array made of a parameter's axes (see `of_axes`), placed on its mesh.

    Unchanged where the parameter lies on no mesh, or is being traced.
    """
    sharding = getattr(parameter, "sharding", None)
    if isinstance(parameter, Tracer) or not isinstance(sharding, NamedSharding):
        return x
    placement = NamedSharding(
        sharding.mesh, PartitionSpec(*of_axes(sharding.spec, axes))
    )
    if placement.is_fully_addressable:
        return jax.device_put(x, placement)
    # For `device_put` all processes would compare their arrays, one message for each.
    return jax.jit(lambda x: x, out_shardings=placement)(x)


def boxed_like(x: jax.Array, node: Any, axes: Sequence[tuple[int, ...]]) -> Any:
    """An array made of a parameter's axes, in a Flax box if the parameter has one.

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
    """How arrays are sharded over Explicit axes, the replica axis left out.

    `stacked` says of each whether it has a leading replica axis.
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
    """A function of one replica under `shard_map`, for stacked operands and results.

    Inside, the axes of a replica are automatic: at the boundary of a `shard_map` over
    another axis JAX 0.10.2 gathers what is sharded over Explicit ones. `in_specs` are
    over the replica axis, `like` are `explicit_specs` of the results.
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
    """The array sharded as given, if it is: over Explicit axes by its type."""
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
