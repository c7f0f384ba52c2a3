"""Replicas on a mesh: state that differs between them, and the step that moves it.

Everything that may differ between replicas has a leading replica axis: parameters,
optimizer state, counters. A training step is written for one replica, without that
axis, and `step` runs it on all of them. `consensus` is the model of all.
"""

from curvadion_jax.replicas._mesh import AXIS, make_mesh
from curvadion_jax.replicas._model import anchor, consensus, divergence, reanchor
from curvadion_jax.replicas._recover import repair, resize
from curvadion_jax.replicas._state import offload, replicate
from curvadion_jax.replicas._step import CompiledStep, step

__all__ = [
    "AXIS",
    "CompiledStep",
    "anchor",
    "consensus",
    "divergence",
    "make_mesh",
    "offload",
    "reanchor",
    "repair",
    "replicate",
    "resize",
    "step",
]
