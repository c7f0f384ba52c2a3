"""How `curvadion` and `local_muon` bring replicas together unless told otherwise."""

import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, compressors, synchronizers

# What lost least in benchmarks/communication; MuLoCo has 0.7 and 0.6.
_OUTER_LEARNING_RATE, _OUTER_MOMENTUM = 1.0, 0.4
_BITS = 2
# Loses nothing there outside of the seeds' spread (`study.py memory`).
_STATE = jnp.bfloat16


def sync_in(
    bits: int | None, synchronizer: synchronizers.Synchronizer | None
) -> synchronizers.Synchronizer:
    """A Nesterov step of the anchor in so many bits, or the synchronizer given.

    Raises:
      ValueError: if bits are given beside a synchronizer.
    """
    _arguments.check_one(bits=bits, synchronizer=synchronizer)
    if synchronizer is None:
        return synchronizers.reconcile(
            optax.sgd(
                _OUTER_LEARNING_RATE,
                _OUTER_MOMENTUM,
                nesterov=True,
                accumulator_dtype=_STATE,
            ),
            compressor=compressors.quantize(_BITS if bits is None else bits),
            momentum=False,
            residual_dtype=_STATE,
        )
    return synchronizer
