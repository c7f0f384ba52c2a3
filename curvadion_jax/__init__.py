"""Dion and CurvaDion for JAX and Optax: pretraining across slow links.

Replicas of a model step alone and synchronise only when it matters. Start with
:func:`curvadion` and `curvadion_jax.replicas`.
"""

import importlib.metadata

from curvadion_jax import checkpoint as checkpoint
from curvadion_jax import cost_model as cost_model
from curvadion_jax import metrics as metrics
from curvadion_jax import presets as presets
from curvadion_jax import replicas as replicas
from curvadion_jax import synchronizers as synchronizers
from curvadion_jax import triggers as triggers
from curvadion_jax._adaptive_sync import AdaptiveSyncState as AdaptiveSyncState
from curvadion_jax._adaptive_sync import SyncMetrics as SyncMetrics
from curvadion_jax._adaptive_sync import adaptive_sync as adaptive_sync
from curvadion_jax._curvadion import curvadion as curvadion
from curvadion_jax._dion import DionState as DionState
from curvadion_jax._dion import dion as dion
from curvadion_jax._dion import scale_by_dion as scale_by_dion
from curvadion_jax._orthonormalize import cholesky_qr as cholesky_qr
from curvadion_jax._orthonormalize import householder_qr as householder_qr
from curvadion_jax._partition import DimensionNumbers as DimensionNumbers
from curvadion_jax._partition import (
    default_dimension_numbers as default_dimension_numbers,
)
from curvadion_jax._partition import describe_partition as describe_partition

__version__ = importlib.metadata.version("curvadion-jax")
