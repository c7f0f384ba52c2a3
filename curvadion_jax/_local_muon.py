"""Local steps of Muon, which come together within a budget of bytes."""

from typing import Any

import jax
import optax

from curvadion_jax import _arguments, _default_sync, _partition, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._muon import EPSILON, muon, muon_adamw

_BUDGET = 0.01


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
    axis_name: str | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Replicas take steps of Muon alone, and come together within a budget of bytes.

    What lost least for its bytes in `benchmarks/communication`, but for the momentum.
    At a sync the pseudo-gradients of the replicas are averaged, in 2 bits and with
    error feedback, and the anchor takes a Nesterov step along the mean; what both
    remember is bfloat16. Syncs are
    evenly spaced, as often as the budget allows. It is MuLoCo in 2 bits with another
    outer step, and a budget in place of a period (`presets.muloco` has the values of
    that paper, in float32), and not the method of the CurvaDion paper: that is
    :func:`curvadion`.

    Args:
      learning_rate: a number or a schedule.
      budget: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step. None is 0.01, one percent: a sync about every 7 steps.
      bits: 8, 4, 2 or 1 for pseudo-gradients in so many bits; None is 2. Where syncs
        were few (16, with a budget of 0.001) 4 lost less, in half as many.
      momentum: decay rate of the local momentum, a number or a schedule. In runs of 300
        steps 0.8 and 0.9 lost less than Muon's usual 0.95; and one that rises from 0.8
        to 0.95 over the run lost least. All this in synchronous runs too.
      weight_decay, weight_decay_mask: as for `optax.contrib.muon`; of matrices only.
      mu_dtype: dtype of the momenta; None keeps the parameters'.
      adam_learning_rate: number or schedule for AdamW of the other parameters
        (embeddings, output heads, norms, biases), with Nesterov momentum, b1 = 0.9 and
        b2 = 0.95; None is `learning_rate`.
      other_optimizer: any Optax optimizer in place of that AdamW, with its own
        learning rate.
      dimension_numbers: as for :func:`dion`.
      trigger: when to synchronise, in place of the budget; None is
        ``triggers.evenly(budget)``.
      synchronizer: how replicas come together; None is ``reconcile`` with the outer
        step and the compressor above, which leaves momenta local.
      axis_name: name of the replica axis; None is one replica, which sends nothing, and
        takes the outer steps all the same.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`. Its place is the last in a
      chain. Read what it did with `curvadion_jax.metrics.read`.

    Raises:
      TypeError: for an argument of the wrong kind.
      ValueError: for one that is out of range, a budget beside a trigger, or bits
        beside a synchronizer.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = local_muon(0.01, budget=0.0352)  # a sync in 2 bits: 7% of float32
      >>> state, syncs = tx.init(params), []
      >>> update = jax.jit(tx.update)
      >>> for _ in range(4):
      ...     updates, state = update(params, state, params)
      ...     syncs.append(int(state.metrics.synced))
      >>> syncs
      [0, 1, 0, 1]

      A momentum that rises over a run of 1000 steps:

      >>> tx = local_muon(0.01, momentum=optax.linear_schedule(0.8, 0.95, 1000))

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    _arguments.check_numbers(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
    )
    _arguments.check_number(momentum, "momentum", below=1)
    _arguments.check_one(budget=budget, trigger=trigger)
    _arguments.check_one(
        adam_learning_rate=adam_learning_rate, other_optimizer=other_optimizer
    )
    if trigger is None:
        budget = _BUDGET if budget is None else budget
        _arguments.check_fraction(budget, "budget")
        trigger = triggers.evenly(budget)
    synchronizer = _default_sync.sync_in(bits, synchronizer)
    if other_optimizer is None:
        rate = learning_rate if adam_learning_rate is None else adam_learning_rate
        other_optimizer = muon_adamw(rate, EPSILON, mu_dtype)

    def matrices(numbers):
        return muon(
            learning_rate,
            numbers,
            beta=momentum,
            eps=EPSILON,
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
        )

    return adaptive_sync(
        _partition.optimizer(matrices, other_optimizer, dimension_numbers),
        trigger,
        synchronizer,
        axis_name,
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )
