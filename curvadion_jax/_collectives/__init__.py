"""The only part that talks between replicas.

Everything takes `axis_name: str | None`; None is one replica, for which every reduction
is the identity. `_axes` is what JAX knows of who holds what; `_replicas` communicates.
What moves between the devices of one replica is in `_within_replica`.
"""

from curvadion_jax._collectives._axes import (
    axes_of,
    axis_size,
    check_axis_name,
    checked_axes,
    is_checked,
    is_manual,
    is_varying,
    vary,
    vary_over,
    varying_aval,
    varying_manual_axes,
)
from curvadion_jax._collectives._replicas import Replicas, gathered, largest

__all__ = [
    "Replicas",
    "axes_of",
    "axis_size",
    "check_axis_name",
    "checked_axes",
    "gathered",
    "is_checked",
    "is_manual",
    "is_varying",
    "largest",
    "vary",
    "vary_over",
    "varying_aval",
    "varying_manual_axes",
]
