"""Synchronizers decide what replicas send at a sync, and how it changes them.

`average_gradients` and `average_factors` average within the step, before the inner
optimizer's update; with `always` they equal training on one big batch. `reconcile` lets
every replica take its own step and then averages the results.
"""

from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState
from curvadion_jax.synchronizers._factors import average_factors
from curvadion_jax.synchronizers._gradients import average_gradients
from curvadion_jax.synchronizers._reconcile import reconcile

__all__ = [
    "Group",
    "LocalStep",
    "SyncState",
    "Synchronizer",
    "average_factors",
    "average_gradients",
    "reconcile",
]
