"""The mesh whose first axis is the replicas."""

import collections
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXIS = "replica"
_log = logging.getLogger("curvadion_jax")


def make_mesh(
    replicas: int,
    inner: Mapping[str, int] | None = None,
    *,
    axis_name: str = AXIS,
    devices: Sequence[Any] | None = None,
    inner_type: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh whose first axis is the replicas, of type Auto.

    Args:
      replicas: number of replicas.
      inner: axes inside a replica and their sizes, such as {"fsdp": 4}; neighbouring
        devices belong to one replica.
      axis_name: name of the replica axis.
      devices: devices to use, in this order. None is those of `jax.devices()`, slice by
        slice and process by process, so that a replica of a slice's size is a slice; of
        more devices than needed, as many of each slice or process, and those that stay
        idle are told in the log.
      inner_type: type of the inner axes, Auto, or Explicit for a model whose arrays
        have their sharding in their types; see `jax.sharding.AxisType`.

    Returns:
      The mesh, the replica axis first and then those of `inner`.

    Raises:
      TypeError: if `replicas` or a size is not an int, or another argument of the wrong
        kind.
      ValueError: if there are too few devices, a size is below 1, an inner axis has
        the replica axis's name, `inner_type` is another, or a process would have no
        device in the mesh.

    Example:
      >>> make_mesh(1).axis_names
      ('replica',)
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a string, got {axis_name!r}")
    if not isinstance(inner, Mapping | None):
        raise TypeError(
            'inner must map names of axes to their sizes, such as {"fsdp": 4}, got '
            f"{inner!r}"
        )
    if isinstance(devices, str):
        raise TypeError(
            f"devices must be devices such as jax.devices({devices!r}), got {devices!r}"
        )
    if inner_type not in (AxisType.Auto, AxisType.Explicit):
        raise ValueError(
            "inner_type must be jax.sharding.AxisType.Auto or AxisType.Explicit, got "
            f"{inner_type!r}"
        )
    if axis_name in (inner or {}):
        raise ValueError(
            f"the replica axis and an inner axis are both named {axis_name!r}: rename "
            "the inner one"
        )
    sizes = {axis_name: replicas, **(inner or {})}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"the size of mesh axis {name!r} must be an int, got {size!r}"
            )
        if size < 1:
            raise ValueError(
                f"the size of mesh axis {name!r} must be at least 1, got {size}; if it "
                "is a share of jax.device_count(), there are too few devices"
            )
    needed = math.prod(sizes.values())
    every = jax.devices() if devices is None else list(devices)
    if len(every) < needed:
        raise ValueError(
            f"a mesh of {sizes} needs {needed} devices, there are {len(every)}. On "
            f'CPU call jax.config.update("jax_num_cpu_devices", {needed}) before '
            "anything else uses JAX"
        )
    if devices is None:
        every = _side_by_side(every, replicas, needed)
        _check_processes(every[:needed], sizes)
        idle = len(every) - needed
        if idle and jax.process_index() == 0:
            _log.warning(
                "make_mesh uses %d of %d devices and leaves %d idle: give more "
                "replicas, or axes inside one, or name the devices",
                needed,
                len(every),
                idle,
            )
    grid = np.array(every[:needed], dtype=object).reshape(list(sizes.values()))
    types = (AxisType.Auto, *[inner_type] * (len(sizes) - 1))
    return Mesh(grid, tuple(sizes), axis_types=types)


def _side_by_side(devices: Sequence[Any], replicas: int, needed: int) -> list[Any]:
    """The devices that a mesh takes, those joined by fast links next to each other."""

    def slice_of(device):
        return getattr(device, "slice_index", 0)  # not every platform has slices

    devices = sorted(devices, key=lambda d: (slice_of(d), d.process_index))
    for unit in (slice_of, lambda device: device.process_index):
        units = collections.defaultdict(list)
        for device in devices:
            units[unit(device)].append(device)
        share, rest = divmod(needed, len(units))
        fits = replicas % len(units) == 0 and min(map(len, units.values())) >= share
        if len(units) > 1 and not rest and fits:
            return [device for some in units.values() for device in some[:share]]
    return devices


def _check_processes(devices: Sequence[Any], sizes: Mapping[str, int]) -> None:
    taking_part = {device.process_index for device in devices}
    if missing := set(range(jax.process_count())) - taking_part:
        raise ValueError(
            f"a mesh of {sizes} leaves process {min(missing)} of {jax.process_count()} "
            "without a device, and every process must have one: give more replicas, or "
            "start fewer processes"
        )


def check_axis(mesh: Any, axis_name: str) -> None:
    """Refuses a mesh without the replica axis, or with axes that are not automatic."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, as curvadion_jax.replicas.make_mesh(8) "
            f"makes one, got {mesh!r:.200}"
        )
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names} and no {axis_name!r}: make it "
            "with curvadion_jax.replicas.make_mesh, or pass axis_name"
        )
    check_context(mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types[axis_name] != AxisType.Auto:
        raise ValueError(
            f"the replica axis {axis_name!r} is of type {types[axis_name]}, as "
            "jax.make_mesh makes axes by default, and must be Auto: JAX cannot take "
            "one replica, x[0], of an Explicit axis. Make the mesh with "
            "curvadion_jax.replicas.make_mesh, or with axis_types; axes inside a "
            "replica may be of both types"
        )


def check_context(mesh: Mesh) -> None:
    """Refuses to work in the context of another mesh, where arrays cannot be mixed."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != mesh.abstract_mesh:
        raise ValueError(
            f"this runs in the context of the mesh {_described(context)}, and the mesh "
            f"of the replicas is {_described(mesh.abstract_mesh)}: give jax.set_mesh "
            "this one, or set none"
        )


def _described(mesh: jax.sharding.AbstractMesh) -> str:
    types = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for (name, size), kind in types)
