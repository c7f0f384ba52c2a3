"""What a run sends and how long its steps take, before any of it is run.

For planning: bytes a step that one replica sends under each kind of sync, the time of
an all-reduce on a link of given bandwidth and round-trip time, step times and speedups
of methods, and the sync rate at which a method breaks even. Plain Python; nothing here
touches a device. `python -m curvadion_jax.cost_model` prints the paper's projected
speedups beside those of this model (docs/projections.md).

The parts know little of each other: `ModelSize` and the `*_payload` functions know
shapes, `Link` and the `*_time` functions know payloads and replicas, `Method`,
`speedup` and `break_even` know seconds.

Examples:
  A 160M model, whose matrices have 85M elements, on 8 sites with 5 Gb/s and 70 ms:

  >>> from curvadion_jax import cost_model
  >>> size = cost_model.ModelSize(
  ...     matrices=(
  ...         cost_model.MatrixShape(batch=48, rows=768, cols=768),
  ...         cost_model.MatrixShape(batch=24, rows=3072, cols=768),
  ...     ),
  ...     other_elements=77_266_944,
  ... )
  >>> link = cost_model.Link(bandwidth=5e9, round_trip_time=0.07)
  >>> gradients = cost_model.gradient_payload(size)
  >>> reconcile = cost_model.reconcile_payload(size)
  >>> synchronous = cost_model.Method(0.3, cost_model.ring_time(gradients, 8, link))
  >>> triggered = cost_model.Method(
  ...     compute_time=0.3,
  ...     sync_time=cost_model.ring_time(reconcile, 8, link),
  ...     sync_rate=0.03,
  ...     flag_time=cost_model.flag_time(8, link),
  ... )
  >>> share = cost_model.share_of_synchronous(reconcile, size, sync_rate=0.03)
  >>> print(f"{share:.2%} of the bytes")
  4.57% of the bytes
  >>> print(f"{cost_model.speedup(triggered, synchronous):.2f} times as fast")
  4.29 times as fast
  >>> print(cost_model.break_even(triggered, synchronous))
  64.36%
"""

from curvadion_jax.cost_model._flag import flag_time
from curvadion_jax.cost_model._links import (
    Link,
    recursive_doubling_time,
    ring_time,
    tree_time,
)
from curvadion_jax.cost_model._projections import (
    Projection,
    Sensitivity,
    published_projections,
    published_sensitivity,
)
from curvadion_jax.cost_model._sent import (
    all_gather_bytes,
    all_reduce_bytes,
    bytes_per_step,
    share_of_synchronous,
    sync_bytes,
)
from curvadion_jax.cost_model._size import (
    FLAG_BYTES,
    WEIGHT_BYTES,
    MatrixShape,
    ModelSize,
    factor_payload,
    gradient_payload,
    model_size,
    reconcile_payload,
)
from curvadion_jax.cost_model._steps import BreakEven, Method, break_even, speedup
from curvadion_jax.cost_model._tables import projections_table, sensitivity_table

__all__ = [
    "FLAG_BYTES",
    "WEIGHT_BYTES",
    "BreakEven",
    "Link",
    "MatrixShape",
    "Method",
    "ModelSize",
    "Projection",
    "Sensitivity",
    "all_gather_bytes",
    "all_reduce_bytes",
    "break_even",
    "bytes_per_step",
    "factor_payload",
    "flag_time",
    "gradient_payload",
    "model_size",
    "projections_table",
    "published_projections",
    "published_sensitivity",
    "reconcile_payload",
    "recursive_doubling_time",
    "ring_time",
    "sensitivity_table",
    "share_of_synchronous",
    "speedup",
    "sync_bytes",
    "tree_time",
]
