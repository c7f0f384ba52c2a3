"""Synchronizers decide what is sent and how replicas come together."""

from curvadion_jax._local_step import LocalStep
from curvadion_jax._protocols import Group, Measured, Synchronizer, SyncState
from curvadion_jax.synchronizers._factors import average_factors
from curvadion_jax.synchronizers._fragments import fragment_paths
from curvadion_jax.synchronizers._gradients import average_gradients
from curvadion_jax.synchronizers._reconcile import reconcile
from curvadion_jax.synchronizers._reconciler import ReconcileCommon

__all__ = [
    "Group",
    "LocalStep",
    "Measured",
    "ReconcileCommon",
    "SyncState",
    "Synchronizer",
    "average_factors",
    "average_gradients",
    "fragment_paths",
    "reconcile",
]
