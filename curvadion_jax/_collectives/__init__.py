"""The only part that talks between devices.

Across replicas everything takes `axis_name: str | None`; None is one replica, for which
every reduction is the identity. `_axes` is what JAX knows of who holds what, and the
check that gradients are still each replica's own; `_replicas` talks over the replica
axis, `_devices` and `_by_matrix` inside a replica.
"""

from curvadion_jax._collectives._axes import (
    axes_of,
    axis_size,
    check_axis_name,
    checked_axes,
    is_checked,
    is_manual,
    is_varying,
    require_local,
    vary,
    vary_over,
    varying_aval,
    varying_manual_axes,
)
from curvadion_jax._collectives._by_matrix import by_matrix
from curvadion_jax._collectives._replicas import group, largest, mean

__all__ = [
    "axes_of",
    "axis_size",
    "by_matrix",
    "check_axis_name",
    "checked_axes",
    "group",
    "is_checked",
    "is_manual",
    "is_varying",
    "largest",
    "mean",
    "require_local",
    "vary",
    "vary_over",
    "varying_aval",
    "varying_manual_axes",
]
