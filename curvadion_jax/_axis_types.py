"""Mesh axes inside a replica of type Explicit, beside those of type Auto.

The types of a step's arrays name Explicit axes (https://docs.jax.dev/en/latest/notebooks/
explicit-sharding.html). The model may be written for that; an update of the optimizer
sees automatic axes alone.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def _explicit(mesh: Mesh | jax.sharding.AbstractMesh) -> tuple[str, ...]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def specs(tree: Any, stacked: Any) -> Any:
    """How arrays are divided over Explicit axes, the replica axis left out.

    Args:
      tree: arrays.
      stacked: for each whether it has a leading replica axis.
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

    Inside, the axes of a replica are automatic. (Explicit ones keep the compiler from
    dividing the work, and at the boundary of a `shard_map` over another axis JAX 0.10.2
    gathers what lies over them.)

    Args:
      function: of the operands, the replica axis not stripped.
      mesh: mesh with the replica axis, which is automatic.
      axis_name: name of the replica axis.
      in_specs: tree prefix of the operands, over the replica axis.
      like: `specs` of the results.
      check_vma: as for `jax.shard_map`.
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
    if not (explicit := _explicit(mesh)):
        return mapped
    results = jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(None, *spec)), like
    )
    return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=results)


def split_rows(x: jax.Array, number: int) -> jax.Array:
    """[rows, ...] -> [number, rows / number, ...], divided as they were."""
    sharding = jax.typeof(x).sharding
    return lax.reshape(
        x,
        (number, x.shape[0] // number, *x.shape[1:]),
        out_sharding=sharding.update(spec=PartitionSpec(None, *sharding.spec)),
    )


def constrain(x: jax.Array, placement: NamedSharding) -> jax.Array:
    """The array where it shall lie: over Explicit axes by its type."""
    if not (explicit := set(_explicit(placement.mesh))):
        return lax.with_sharding_constraint(x, placement)

    def part(entry, of_type):
        names = tuple(n for n in jax.tree.leaves(entry) if (n in explicit) == of_type)
        if of_type or len(names) == len(jax.tree.leaves(entry)):
            return names or None
        return PartitionSpec.UNCONSTRAINED

    typed, free = (
        placement.update(spec=PartitionSpec(*[part(e, of) for e in placement.spec]))
        for of in (True, False)
    )
    return lax.with_sharding_constraint(jax.sharding.reshard(x, typed), free)
