"""CurvaDion: replicas that step alone, and come together within a budget of bytes."""

from typing import Any

import jax
import optax

from curvadion_jax import (
    _arguments,
    _orthonormalize,
    _partition,
    compressors,
    synchronizers,
    triggers,
)
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import check_other_optimizer, check_rates, dion
from curvadion_jax._muon import muon, muon_adamw

# What lost least in benchmarks/communication; MuLoCo has 0.7 and 0.6.
_OUTER_LEARNING_RATE, _OUTER_MOMENTUM = 1.0, 0.4
_EPSILON = 1e-7  # 1e-8 is zero in float16


def curvadion(
    learning_rate: optax.ScalarOrSchedule,
    rank: int | float | None = None,
    momentum: jax.typing.ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    other_optimizer: optax.GradientTransformation | None = None,
    other_learning_rate: optax.ScalarOrSchedule | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
    error_feedback: bool = True,
    seed: jax.typing.ArrayLike = 0,
    axis_name: str | None = None,
    budget: jax.typing.ArrayLike | None = None,
    trigger: triggers.Trigger | None = None,
    synchronizer: synchronizers.Synchronizer | None = None,
    local_step: optax.GradientTransformation | None = None,
    ask_every: int | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Replicas step alone, and come together within a budget of bytes.

    An :func:`adaptive_sync` whose defaults are, but for the momentum, what lost least
    in `benchmarks/communication` for the bytes that it sent. Every replica takes
    orthonormalised momentum steps on its own gradients. At a sync the drifts of the
    replicas are averaged, in 2 bits and with error feedback, and the common point
    takes a Nesterov step along the mean drift. Syncs are spaced so that they send
    `budget` of what synchronous training would.

    .. warning::
      This is not the paper's method. There, syncs average gradients, which cannot bring
      replicas back together that have stepped alone; and the relative momentum change
      says when to synchronise, where evenly spaced syncs lost less for the same bytes
      in our runs. For the paper's trigger pass
      ``trigger=triggers.relative_momentum_change(0.3)``, or let it spend the budget,
      ``trigger=triggers.budget(0.01)``; for its formula, and for what its authors' code
      does, see `curvadion_jax.presets`.

    Args:
      learning_rate: a number or a schedule.
      rank: of the local steps. None is full rank: `optax.contrib.muon`'s step,
        since a step that sends nothing need not be of low rank to send little. A
        number gives the steps of :func:`dion` at that rank, which cost less
        arithmetic; static under `optax.inject_hyperparams`.
      momentum: decay rate of the local momentum. In runs of 300 steps 0.8 and 0.9 lost
        less than the usual 0.95 (:func:`dion`'s own), in synchronous runs too.
      weight_decay: as for :func:`dion`.
      weight_decay_mask: as for :func:`dion`.
      mu_dtype: as for :func:`dion`.
      other_optimizer: as for :func:`dion`; but without a rank None is Muon's own AdamW,
        which has Nesterov momentum, with b1 = 0.9 and b2 = 0.95.
      other_learning_rate: as for :func:`dion`.
      dimension_numbers: as for :func:`dion`.
      orthonormalize: as for :func:`dion`, with a rank.
      error_feedback: as for :func:`dion`, with a rank.
      seed: as for :func:`dion`, with a rank.
      axis_name: name of the replica axis; None is one replica, which sends nothing, and
        takes the outer steps all the same.
      budget: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step. None is 0.01, one percent: a sync about every 7 steps.
        The decision's 4 bytes a step are not counted in.
      trigger: when to synchronise, in place of the budget; None is
        ``triggers.evenly(budget)``. (`triggers.budget` is another trigger, which spends
        a share where a signal says so.)
      synchronizer: how replicas come together; None is ``reconcile`` with the outer
        step and the compressor above, which leaves momenta local.
      local_step: as for :func:`adaptive_sync`; None is the local optimizer's step.
      ask_every: as for :func:`adaptive_sync`.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`. Its place is the last in a
      chain. Read what it did with `curvadion_jax.metrics.read`.

    Raises:
      TypeError: as for :func:`dion` and :func:`adaptive_sync`.
      ValueError: as for :func:`dion` and :func:`adaptive_sync`, for a budget that is
        not above 0, or above 1, or beside a trigger, and for what only Dion's local
        steps read, without a rank.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = curvadion(0.01, budget=0.0352)  # 2 bits and scales: 7% of float32 a sync
      >>> state, syncs = tx.init(params), []
      >>> update = jax.jit(tx.update)
      >>> for _ in range(4):
      ...     updates, state = update(params, state, params)
      ...     syncs.append(int(state.metrics.synced))
      >>> syncs
      [0, 1, 0, 1]

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025

      Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025

      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    if budget is not None:
        _arguments.check_positive(budget, "budget")
    if isinstance(budget, int | float) and budget > 1:
        raise ValueError(
            f"budget is a share of the bytes of synchronous training, got {budget}; "
            "ten percent is 0.1"
        )
    if trigger is None:
        trigger = triggers.evenly(0.01 if budget is None else budget)
    elif budget is not None:
        raise ValueError(
            "give a budget or a trigger: a trigger keeps to a budget of its own, such "
            f"as triggers.evenly({budget}) or triggers.budget({budget}); got both"
        )
    if rank is None and (orthonormalize is not None or not error_feedback):
        raise ValueError(
            "orthonormalize and error_feedback belong to local steps of Dion: give a "
            f"rank with them, such as rank=0.25; got {orthonormalize=} and "
            f"{error_feedback=}"
        )
    if synchronizer is None:
        synchronizer = synchronizers.reconcile(
            optax.sgd(_OUTER_LEARNING_RATE, _OUTER_MOMENTUM, nesterov=True),
            compressor=compressors.quantize(2),
            momentum=False,
        )
    if rank is None:
        check_rates(learning_rate, weight_decay, other_learning_rate)
        _arguments.check_momentum(momentum)
        _arguments.check_dtype(mu_dtype, "mu_dtype")
        _arguments.check_switch(error_feedback, "error_feedback")
        _arguments.check_seed(seed)
        if other_optimizer is None:
            rate = learning_rate if other_learning_rate is None else other_learning_rate
            other_optimizer = muon_adamw(rate, _EPSILON, mu_dtype)
        else:
            check_other_optimizer(other_optimizer, other_learning_rate)

        def matrices(numbers):
            return muon(
                learning_rate,
                numbers,
                beta=momentum,
                eps=_EPSILON,
                weight_decay=weight_decay,
                weight_decay_mask=weight_decay_mask,
                mu_dtype=mu_dtype,
            )

        inner = _partition.optimizer(matrices, other_optimizer, dimension_numbers)
    else:
        inner = dion(
            learning_rate,
            rank,
            momentum,
            weight_decay,
            weight_decay_mask,
            mu_dtype,
            other_optimizer=other_optimizer,
            other_learning_rate=other_learning_rate,
            dimension_numbers=dimension_numbers,
            orthonormalize=orthonormalize,
            error_feedback=error_feedback,
            seed=seed,
        )
    return adaptive_sync(
        inner,
        trigger,
        synchronizer,
        axis_name,
        local_step=local_step,
        dimension_numbers=dimension_numbers,
        ask_every=ask_every,
        allow_unchecked=allow_unchecked,
    )
