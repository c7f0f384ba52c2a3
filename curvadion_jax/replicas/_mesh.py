"""The mesh whose first axis is the replicas."""

import itertools
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
      inner: axes inside a replica and their sizes, such as {"fsdp": 4}.
      axis_name: name of the replica axis.
      devices: devices to use, in this order; neighbours belong to one replica. None
        means those of `jax.devices()`, slice by slice and process by process, and as
        many of each; a warning is logged if some stay idle.
      inner_type: type of the inner axes, Auto, or Explicit for a model whose arrays
        have their sharding in their types.

    Returns:
      The mesh, the replica axis first and then those of `inner`.

    Raises:
      ValueError: if there are too few devices, an inner axis has the replica axis's
        name, or a process would have no device in the mesh.

    Example:
      >>> make_mesh(1).axis_names
      ('replica',)
    """
    inner = dict(inner or {})
    if axis_name in inner:
        raise ValueError(
            f"The replica axis and an inner axis are both named {axis_name!r}. Rename "
            "the inner one."
        )
    sizes = {axis_name: replicas, **inner}
    needed = math.prod(sizes.values())
    every = jax.devices() if devices is None else list(devices)
    if not 0 < needed <= len(every):
        raise ValueError(
            f"A mesh of {sizes} needs {needed} devices, and there are {len(every)}. On "
            'CPU call jax.config.update("jax_num_cpu_devices", ...) before anything '
            "else."
        )
    if devices is None:
        used = _side_by_side(every, replicas, needed)
        numbers = {device.process_index for device in used}
        if missing := set(range(jax.process_count())) - numbers:
            raise ValueError(
                f"A mesh of {sizes} leaves process {min(missing)} without a device. "
                "Make more replicas, or start fewer processes."
            )
        if needed < len(every) and jax.process_index() == 0:
            _log.warning("make_mesh uses %d of %d devices", needed, len(every))
        every = used
    grid = np.array(every[:needed], dtype=object).reshape(list(sizes.values()))
    types = (AxisType.Auto, *[inner_type] * len(inner))
    return Mesh(grid, tuple(sizes), axis_types=types)


def _side_by_side(devices: Sequence[Any], replicas: int, needed: int) -> list[Any]:
    """The devices that a mesh takes, those joined by fast links next to each other."""

    def slice_of(device):
        return getattr(device, "slice_index", 0)  # Not every platform has slices.

    def process_of(device):
        return device.process_index

    devices = sorted(devices, key=lambda d: (slice_of(d), process_of(d)))
    for unit in (slice_of, process_of):
        units = [list(some) for _, some in itertools.groupby(devices, unit)]
        share, rest = divmod(needed, len(units))
        fits = replicas % len(units) == 0 and min(map(len, units)) >= share
        if len(units) > 1 and not rest and fits:
            return [device for some in units for device in some[:share]]
    return devices[:needed]


def check_axis(mesh: Mesh, axis_name: str) -> None:
    """Refuses a mesh without the replica axis, or with one that is Explicit."""
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"The mesh has the axes {mesh.axis_names} and no {axis_name!r}. Make it "
            "with replicas.make_mesh, or pass axis_name."
        )
    check_context(mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types[axis_name] != AxisType.Auto:
        # JAX cannot take one replica, x[0], of an Explicit axis.
        raise ValueError(
            f"The replica axis {axis_name!r} is {types[axis_name]}, as jax.make_mesh "
            "makes it, and must be Auto. Make the mesh with replicas.make_mesh."
        )


def check_context(mesh: Mesh) -> None:
    """Refuses to work in the context of another mesh, where arrays cannot be mixed."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != mesh.abstract_mesh:
        raise ValueError(
            f"jax.set_mesh has set {context}, and the replicas are on "
            f"{mesh.abstract_mesh}. Set this one, or none."
        )
