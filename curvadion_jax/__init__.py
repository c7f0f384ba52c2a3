"""Dion and CurvaDion for JAX and Optax: pretraining across slow links.

Replicas of a model take local steps and synchronise within a budget of bytes. Start
with :func:`local_muon` or :func:`curvadion`, and `curvadion_jax.replicas`.
"""

from curvadion_jax import (
    checkpoint,
    compressors,
    dimension_numbers,
    metrics,
    presets,
    replicas,
    sites,
    synchronizers,
    triggers,
)
from curvadion_jax._version import __version__ as __version__
from curvadion_jax.dimension_numbers import DimensionNumbers
from curvadion_jax.matrices._dion import DionState, dion, scale_by_dion
from curvadion_jax.matrices._two_optimizers import describe_partition
from curvadion_jax.methods._curvadion import curvadion
from curvadion_jax.methods._local_muon import local_muon
from curvadion_jax.step._adaptive_sync import adaptive_sync
from curvadion_jax.step._sync_state import AdaptiveSyncState

__all__ = [
    "AdaptiveSyncState",
    "DimensionNumbers",
    "DionState",
    "adaptive_sync",
    "checkpoint",
    "compressors",
    "curvadion",
    "describe_partition",
    "dimension_numbers",
    "dion",
    "local_muon",
    "metrics",
    "presets",
    "replicas",
    "scale_by_dion",
    "sites",
    "synchronizers",
    "triggers",
]
