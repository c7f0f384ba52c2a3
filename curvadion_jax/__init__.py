"""Dion and CurvaDion for JAX and Optax: pretraining across slow links.

Replicas of a model step alone and synchronise only when it matters. Start with
:func:`curvadion` and `curvadion_jax.replicas`.
"""

import importlib.metadata

from curvadion_jax import (
    checkpoint,
    compressors,
    cost_model,
    metrics,
    outer,
    presets,
    replicas,
    synchronizers,
    triggers,
)
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._counters import SyncMetrics
from curvadion_jax._curvadion import curvadion
from curvadion_jax._dion import DionState, dion, scale_by_dion
from curvadion_jax._orthonormalize import cholesky_qr, householder_qr
from curvadion_jax._partition import (
    DimensionNumbers,
    default_dimension_numbers,
    describe_partition,
)
from curvadion_jax._step import AdaptiveSyncState

__all__ = [
    "AdaptiveSyncState",
    "DimensionNumbers",
    "DionState",
    "SyncMetrics",
    "adaptive_sync",
    "checkpoint",
    "cholesky_qr",
    "compressors",
    "cost_model",
    "curvadion",
    "default_dimension_numbers",
    "describe_partition",
    "dion",
    "householder_qr",
    "metrics",
    "outer",
    "presets",
    "replicas",
    "scale_by_dion",
    "synchronizers",
    "triggers",
]

__version__ = importlib.metadata.version("curvadion-jax")
