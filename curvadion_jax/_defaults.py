"""What `local_muon` and `curvadion` do unless told otherwise: budget and sync."""

import jax.numpy as jnp
import optax

from curvadion_jax import compressors, synchronizers
from curvadion_jax._rows import Replicas

BUDGET = 0.01
_BITS = 2
# MuLoCo has 0.7 and 0.6; these lost less in benchmarks/communication.
_OUTER_LEARNING_RATE, _OUTER_MOMENTUM = 1.0, 0.4
# Dtype of the sync's state. It changes the loss by less than the spread over seeds.
_DTYPE = jnp.bfloat16


def reconcile_in_few_bits(
    bits: int | None, mesh: Replicas
) -> synchronizers.Synchronizer:
    """A Nesterov outer step along the mean pseudo-gradient, sent in few bits."""
    outer = optax.sgd(
        _OUTER_LEARNING_RATE, _OUTER_MOMENTUM, nesterov=True, accumulator_dtype=_DTYPE
    )
    return synchronizers.reconcile(
        # With one replica an outer step would only change the inner optimizer. (A mesh
        # of one has it, so that its state can be resized to more.)
        None if mesh is None else outer,
        compressor=compressors.quantize(_BITS if bits is None else bits),
        residual_dtype=_DTYPE,
    )
