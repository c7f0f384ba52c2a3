"""What replicas send at a sync, and what they make of it; see `Synchronizer`.

There are two kinds. *Within the step*, `average_gradients` and `average_factors`
average what the inner optimizer works on; with `always` they equal training on one
big batch. *After the step*, `reconcile` lets every replica take its own step and then
averages the results.
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
