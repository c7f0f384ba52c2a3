"""What a run sends and how long its steps take, before any of it is run.

For planning: the bytes of a sync, its time and the flag's on a link of given bandwidth
and round-trip time, step times and speedups, and the sync rate at which a method breaks
even. Plain Python; nothing here touches a device. `benchmarks/links.py` and
`benchmarks/projections.py` are tables made with it.

The parts know little of each other: `ModelSize` and the `*_payload` functions know
shapes, `Link` and the `*_time` functions know payloads and replicas, `Method`,
`speedup` and `break_even` know seconds.

Examples:
  A 160M model on 8 sites with 5 Gb/s and 70 ms, parameters in 2 bits every 33 steps:

  >>> import jax, jax.numpy as jnp
  >>> from curvadion_jax import compressors, cost_model
  >>> params = {
  ...     "attention": jax.ShapeDtypeStruct((48, 768, 768), jnp.float32),
  ...     "mlp": jax.ShapeDtypeStruct((24, 768, 3072), jnp.float32),
  ...     "embed": jax.ShapeDtypeStruct((100_608, 768), jnp.float32),
  ... }
  >>> gradients = cost_model.gradient_payload(cost_model.model_size(params))
  >>> rarely = compressors.quantize(2).payload(params, {})
  >>> share = cost_model.bytes_per_step(rarely, 8, sync_rate=1 / 33)
  >>> share /= cost_model.bytes_per_step(gradients, 8, flag=False)
  >>> print(f"{share:.2%} of the bytes")
  0.21% of the bytes
  >>> link = cost_model.Link(bandwidth=5e9, round_trip_time=0.07)
  >>> synchronous = cost_model.Method(0.3, cost_model.ring_time(gradients, 8, link))
  >>> triggered = cost_model.Method(
  ...     compute_time=0.3,
  ...     sync_time=cost_model.ring_time(rarely, 8, link),
  ...     sync_rate=1 / 33,
  ...     flag_time=cost_model.flag_time(8, link, ask_every=33),
  ... )
  >>> print(f"{triggered.communication_share:.0%} of a step waits")
  8% of a step waits
  >>> print(f"{cost_model.speedup(triggered, synchronous):.2f} times as fast")
  8.02 times as fast
"""

from curvadion_jax.cost_model._links import Link, flag_time, ring_time
from curvadion_jax.cost_model._sent import bytes_per_step, sync_bytes
from curvadion_jax.cost_model._size import (
    ModelSize,
    factor_payload,
    gradient_payload,
    model_size,
    reconcile_payload,
)
from curvadion_jax.cost_model._steps import Method, break_even, speedup

__all__ = [
    "Link",
    "Method",
    "ModelSize",
    "break_even",
    "bytes_per_step",
    "factor_payload",
    "flag_time",
    "gradient_payload",
    "model_size",
    "reconcile_payload",
    "ring_time",
    "speedup",
    "sync_bytes",
]
