"""Makes a mesh whose first axis is the replicas."""

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
    """Makes a mesh whose first axis is the replicas, of type Auto.

    Args:
      replicas: number of replicas.
      inner: axes inside a replica and their sizes, such as {"fsdp": 4}.
      axis_name: name of the replica axis.
      devices: devices to use, in this order; neighbours belong to one replica. None
        means `jax.devices()`, by slice and process, at least one of each process; a
        warning is logged if some stay idle.
      inner_type: type of the inner axes, Auto or Explicit.

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
    available = jax.devices() if devices is None else list(devices)
    if not 0 < needed <= len(available):
        raise ValueError(
            f"A mesh of {sizes} needs {needed} devices, and there are "
            f"{len(available)}. On CPU call "
            'jax.config.update("jax_num_cpu_devices", ...) before anything else.'
        )
    if devices is None:
        idle = len(available) - needed
        # Devices joined by fast links stand together. (Not every platform has slices.)
        available = sorted(
            available, key=lambda d: (getattr(d, "slice_index", 0), d.process_index)
        )
        processes = {device.process_index for device in available[:needed]}
        if unused := set(range(jax.process_count())) - processes:
            raise ValueError(
                f"A mesh of {sizes} leaves process {min(unused)} without a device. "
                "Make more replicas, start fewer processes, or choose devices=."
            )
        if idle and jax.process_index() == 0:
            _log.warning("make_mesh uses %d of %d devices", needed, needed + idle)
    grid = np.array(available[:needed], dtype=object).reshape(list(sizes.values()))
    types = (AxisType.Auto, *[inner_type] * len(inner))
    return Mesh(grid, tuple(sizes), axis_types=types)


def check_mesh(mesh: Mesh, axis_name: str) -> None:
    """Rejects a mesh whose replica axis is missing, or Explicit."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # JAX cannot take one replica, x[0], of an Explicit axis.
    if types.get(axis_name) != AxisType.Auto:
        raise ValueError(
            f"The mesh needs an axis {axis_name!r} of type Auto, and has {types}. Make "
            "it with replicas.make_mesh."
        )
