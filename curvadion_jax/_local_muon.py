"""Local Muon steps with evenly spaced, compressed syncs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _partition, compressors, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._muon import muon
from curvadion_jax._rows import Replicas

BUDGET = 0.01
_BITS = 2
# MuLoCo has 0.7 and 0.6; these lost less in benchmarks/communication.
_OUTER_LEARNING_RATE, _OUTER_MOMENTUM = 1.0, 0.4
# Dtype of the sync's state. It changes the loss by less than the spread over seeds.
_DTYPE = jnp.bfloat16


def local_muon(
    learning_rate: optax.ScalarOrSchedule,
    budget: float | None = None,
    bits: int | None = None,
    momentum: optax.ScalarOrSchedule = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    trigger: triggers.Trigger | None = None,
    synchronizer: synchronizers.Synchronizer | None = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Local Muon steps with evenly spaced, compressed syncs.

    Each replica takes Muon steps on its own gradients. At a sync the replicas' mean
    pseudo-gradient (how far they have moved from the last common parameters, the
    anchor) is computed in 2 bits with error feedback; the anchor takes a Nesterov step
    along it, and every replica continues from there. Syncs are evenly spaced, as often
    as `budget` allows. Local steps send nothing.

    This is MuLoCo in 2 bits, with a different outer step and a byte budget in place of
    a period; `presets.muloco` has the paper's values. It is the recommended method. For
    syncs triggered by the momentum see :func:`curvadion`.

    Args:
      learning_rate: number or schedule.
      budget: bytes to send, as a fraction of an all-reduce of all gradients in float32
        on every step. None means 0.01, a sync about every 7 steps. Not with `trigger`.
      bits: bits per element of the pseudo-gradients: 8, 4, 2 or 1. None means 2. For
        very small budgets (0.001), try 4. Cannot be combined with `synchronizer`.
      momentum: decay rate of the local momentum; a number in [0, 1) or a schedule. For
        short runs, try ``optax.linear_schedule(0.8, 0.95, steps)``.
      weight_decay: decoupled, of matrices only, times the learning rate.
      weight_decay_mask: as for `optax.contrib.muon`.
      mu_dtype: dtype of the momenta. None means the parameters' dtype.
      adam_learning_rate: learning rate of AdamW, which trains all other parameters
        (embeddings, output heads, norms, biases) with Nesterov momentum, b1 = 0.9 and
        b2 = 0.95. None means `learning_rate`.
      other_optimizer: replaces that AdamW. Not with `adam_learning_rate`.
      dimension_numbers: as for :func:`dion`.
      trigger: when to synchronise. None means ``triggers.evenly(budget)``.
      synchronizer: how replicas synchronise. None means the `reconcile` described
        above, which keeps momenta local and its own state in bfloat16.
      before: as for :func:`adaptive_sync`, such as ``optax.clip_by_global_norm(1.0)``.
      mesh: as for :func:`adaptive_sync`. None means a single replica, on which the
        default sync sends nothing and takes no outer step: the result is Muon's.
      specs: as for :func:`adaptive_sync`.

    Returns:
      An optimizer of rows, with state :class:`AdaptiveSyncState`.
      `curvadion_jax.metrics.read` reports syncs and bytes.

    Example:
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = local_muon(0.01, budget=0.0352)  # a sync in 2 bits: 7% of float32
      >>> state, syncs = tx.init(params), []
      >>> update = jax.jit(tx.update)
      >>> for _ in range(4):
      ...     updates, state = update(params, state, params)
      ...     syncs.append(int(state.counters.syncs))
      >>> syncs
      [0, 1, 1, 2]

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    _arguments.check_numbers(weight_decay=weight_decay)
    _arguments.check_numbers(below=1, momentum=momentum)
    _arguments.check_exclusive(budget=budget, trigger=trigger)
    other_optimizer = _partition.other_optimizer(
        other_optimizer,
        learning_rate,
        adam_learning_rate,
        mu_dtype=mu_dtype,
        nesterov=True,
    )
    if budget is not None:
        _arguments.check_budget(budget)
    if trigger is None:
        trigger = triggers.evenly(BUDGET if budget is None else budget)

    def matrices(numbers):
        return muon(
            learning_rate,
            numbers,
            beta=momentum,
            eps=_partition.EPSILON,
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
        )

    return adaptive_sync(
        _partition.optimizer(matrices, other_optimizer, dimension_numbers),
        trigger,
        default_sync(bits, synchronizer, mesh),
        mesh,
        before=before,
        specs=specs,
    )


def default_sync(
    bits: int | None,
    synchronizer: synchronizers.Synchronizer | None,
    mesh: Replicas,
) -> synchronizers.Synchronizer:
    """The synchronizer of `local_muon` and `curvadion`, unless one is given."""
    _arguments.check_exclusive(bits=bits, synchronizer=synchronizer)
    if synchronizer is not None:
        return synchronizer
    outer = optax.sgd(
        _OUTER_LEARNING_RATE, _OUTER_MOMENTUM, nesterov=True, accumulator_dtype=_DTYPE
    )
    return synchronizers.reconcile(
        # With one replica an outer step would only change the inner optimizer.
        None if mesh is None else outer,
        compressor=compressors.quantize(_BITS if bits is None else bits),
        residual_dtype=_DTYPE,
    )
