"""Synchronizers decide what replicas send at a sync, and how it changes them.

`reconcile` is DiLoCo's outer update: every replica takes its own step, and an outer
optimizer moves their common parameters, the anchor, by the mean of the results.
`average_gradients` and `average_factors` average within the step, before the inner
optimizer's update; with `always` they equal training on one big batch.
"""

from curvadion_jax.synchronizers._factors import average_factors
from curvadion_jax.synchronizers._gradients import average_gradients
from curvadion_jax.synchronizers._reconcile import reconcile
from curvadion_jax.synchronizers._types import (
    AfterStep,
    Group,
    Part,
    Synchronizer,
    WithinStep,
)

__all__ = [
    "AfterStep",
    "Group",
    "Part",
    "Synchronizer",
    "WithinStep",
    "average_factors",
    "average_gradients",
    "reconcile",
]
