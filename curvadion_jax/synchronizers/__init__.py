"""Synchronizers decide what is sent and how replicas come together."""

from curvadion_jax.synchronizers._base import LocalStep as LocalStep
from curvadion_jax.synchronizers._base import Synchronizer as Synchronizer
from curvadion_jax.synchronizers._factors import average_factors as average_factors
from curvadion_jax.synchronizers._gradients import (
    average_gradients as average_gradients,
)
from curvadion_jax.synchronizers._reconcile import ReconcileState as ReconcileState
from curvadion_jax.synchronizers._reconcile import reconcile as reconcile
