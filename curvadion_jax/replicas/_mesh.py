"""Where replicas live: on a mesh whose first axis they are, or on one device."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from curvadion_jax.mesh._rows import AXIS, Simulated

_log = logging.getLogger("curvadion_jax")


def make_mesh(
    replicas: int | None = None,
    inner: Mapping[str, int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    inner_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Makes a mesh whose first axis, "replica", is the replicas, of type Auto.

    Args:
      replicas: number of replicas. None means as many as the devices make.
      inner: axes inside a replica and their sizes, such as {"fsdp": 4}.
      devices: devices to use, in this order; neighbours belong to one replica. None
        means `jax.devices()`, by slice and process, at least one of each process; a
        warning is logged if some stay idle.
      inner_type: type of the inner axes, Auto or Explicit.

    Returns:
      A `jax.sharding.Mesh` with the axes "replica" and those of `inner`.

    Raises:
      TypeError: if `inner` is no mapping, or a number is no int.
      ValueError: if there are fewer devices than the mesh needs, if an inner axis is
        named "replica", or if a process would have no device.

    Example:
      >>> make_mesh(1).axis_names
      ('replica',)
    """
    if not isinstance(inner, Mapping | None):
        raise TypeError(
            f"inner must be a mapping from axes to sizes, got {inner!r}. For replicas "
            'of 4 devices give {"fsdp": 4}.'
        )
    inner = dict(inner or {})
    for size in (replicas, *inner.values()):
        if not isinstance(size, int | np.integer | None):
            raise TypeError(
                f"The number of replicas and the sizes of axes must be ints, got "
                f"{size!r:.80}. Convert text with int."
            )
    if AXIS in inner:
        raise ValueError(
            f"The replica axis and an inner axis are both named {AXIS!r}. Rename "
            "the inner one."
        )
    available = jax.devices() if devices is None else list(devices)
    if replicas is None:
        replicas = len(available) // max(math.prod(inner.values()), 1)
    sizes = {AXIS: replicas, **inner}
    needed = math.prod(sizes.values())
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


def simulated(replicas: int) -> Simulated:
    """Replicas that share one device, for studies, tests and debugging.

    Every function that takes a mesh takes this one. Rows are then ordinary arrays
    [R, ...], and `map` is `jax.vmap`: the numbers are those of a mesh up to rounding.

    Args:
      replicas: their number, at least 1.

    Returns:
      An object that functions take instead of a mesh.

    Raises:
      ValueError: if `replicas` is not an int of at least 1.

    Example:
      >>> simulated(8)
      Simulated(replicas=8)
    """
    if not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas must be an int of at least 1, got {replicas!r}.")
    return Simulated(replicas)
