"""Triggers decide when replicas synchronise; see `Trigger`."""

from curvadion_jax.triggers._base import Decision as Decision
from curvadion_jax.triggers._base import Observation as Observation
from curvadion_jax.triggers._base import Trigger as Trigger
from curvadion_jax.triggers._base import decision as decision
from curvadion_jax.triggers._base import stateless as stateless
from curvadion_jax.triggers._combine import after_steps as after_steps
from curvadion_jax.triggers._combine import any_of as any_of
from curvadion_jax.triggers._combine import at_least_every as at_least_every
from curvadion_jax.triggers._combine import at_most_every as at_most_every
from curvadion_jax.triggers._momentum_change import (
    relative_momentum_change as relative_momentum_change,
)
from curvadion_jax.triggers._periodic import always as always
from curvadion_jax.triggers._periodic import every_k as every_k
from curvadion_jax.triggers._periodic import never as never
