"""Triggers decide when replicas synchronise; see `Trigger`."""

from curvadion_jax._protocols import Decision, Observation, Trigger
from curvadion_jax.triggers._base import decision, stateless
from curvadion_jax.triggers._budget import BudgetState, SpendingState, budget, evenly
from curvadion_jax.triggers._combine import (
    after_steps,
    any_of,
    at_least_every,
    at_most_every,
)
from curvadion_jax.triggers._delay import (
    DelayedState,
    RememberedState,
    delayed,
    remembered,
)
from curvadion_jax.triggers._drift import drift
from curvadion_jax.triggers._momentum_change import (
    relative_momentum_change,
)
from curvadion_jax.triggers._periodic import (
    always,
    every_k,
    never,
    quadratic_period,
)
from curvadion_jax.triggers._weighted import weighted

__all__ = [
    "BudgetState",
    "Decision",
    "DelayedState",
    "Observation",
    "RememberedState",
    "SpendingState",
    "Trigger",
    "after_steps",
    "always",
    "any_of",
    "at_least_every",
    "at_most_every",
    "budget",
    "decision",
    "delayed",
    "drift",
    "evenly",
    "every_k",
    "never",
    "quadratic_period",
    "relative_momentum_change",
    "remembered",
    "stateless",
    "weighted",
]
