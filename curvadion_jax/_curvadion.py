"""CurvaDion: Dion on replicas that step alone until a momentum changes fast."""

from typing import Any

import jax
import optax

from curvadion_jax import (
    _arguments,
    _default_sync,
    _orthonormalize,
    _partition,
    synchronizers,
    triggers,
)
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import dion

_BUDGET, _RANK = 0.01, 1.0
# Syncs by which the budget may be ahead of its share, or behind.
_BOUNDS = 1.0


def curvadion(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule | None = None,
    rank: int | float | None = None,
    momentum: optax.ScalarOrSchedule = 0.8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    budget: float | None = None,
    bits: int | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
    error_feedback: bool = True,
    seed: jax.typing.ArrayLike = 0,
    synchronizer: synchronizers.Synchronizer | None = None,
    axis_name: str | None = None,
    decision_interval: int = 1,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""CurvaDion: replicas take Dion's steps alone until a momentum changes fast.

    Every replica keeps a momentum and a right factor Q of every matrix. On every step
    the relative momentum change (RMMC) of every matrix is compared with a threshold,

    .. math::
      \mathrm{RMMC} = \bigl|\, \|m_t\| - \|m_{t-1}\| \,\bigr| \,/\, \|m_{t-1}\|,

    and the largest of all layers and replicas decides, in one `lax.cond`, between a
    local step and one that brings the replicas together.

    ================== ============================== ================================
    part               the paper's formula            here
    ================== ============================== ================================
    state              momentum and Q                 the same
    trigger            max over layers of RMMC        the same, and over replicas; the
                       above a threshold              norm of M + G, before error
                                                      feedback; a `budget` finds the
                                                      threshold
    a local step       plain gradient step            Dion's step on the replica's own
                                                      gradient
    a sync step        Dion's step on the mean        Dion's own step, then a Nesterov
                       gradient                       step of the anchor along the mean
                                                      pseudo-gradient, which is sent in
                                                      2 bits with error feedback
    replicas           never brought together         equal after every sync
    ================== ============================== ================================

    The right column is what lost least with these ingredients in the study of
    `benchmarks/communication`. The formula as published is `presets.paper`, the rules
    of the authors' code `presets.authors_code`.

    Args:
      learning_rate: a number or a schedule.
      threshold: of RMMC, a number or a schedule of the steps. It belongs to a batch
        size: RMMC lies at 0.2 to 0.6 with a thousand tokens a replica, at 0.02 to 0.03
        with a million.
      rank: as for :func:`dion`; but None is 1.0, full rank: Dion's low rank is there to
        send little, and a local step sends nothing.
      momentum: decay rate of the local momentum, a number or a schedule. In a run of
        300 steps 0.8 lost 1.2% less than 0.9.
      weight_decay, weight_decay_mask, mu_dtype: as for :func:`dion`.
      budget: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step, in place of a threshold: ``triggers.budget(budget,
        ahead=1, behind=1)`` moves the threshold so that it is spent. None is 0.01, one
        percent, without a threshold. The 4 bytes of each decision are not counted in.
      bits: 8, 4, 2 or 1 for pseudo-gradients in so many bits; None is 2.
      adam_learning_rate, other_optimizer, dimension_numbers: as for :func:`dion`.
      orthonormalize, error_feedback, seed: as for :func:`dion`.
      synchronizer: how replicas come together, in place of the sync step above.
      axis_name: name of the replica axis; None is one replica, which sends nothing, and
        takes the outer steps all the same.
      decision_interval: number of steps from one vote of the replicas to the next. A
        vote costs a round trip over the slow link; with k steps in between, what a
        replica requests waits up to k - 1 steps, and nothing is sent on those.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`. Its place is the last in a
      chain. Read what it did with `curvadion_jax.metrics.read`.

    Raises:
      TypeError: as for :func:`dion` and :func:`adaptive_sync`.
      ValueError: as for :func:`dion` and :func:`adaptive_sync`, for a threshold beside
        a budget, or bits beside a synchronizer.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = curvadion(0.01, threshold=0.3)
      >>> state, values = tx.init(params), []
      >>> update = jax.jit(tx.update)
      >>> for _ in range(4):  # constant gradients: ever less of a change
      ...     updates, state = update(params, state, params)
      ...     values.append(f"{state.metrics.value:.2f}")
      >>> print(*values, state.metrics.syncs)
      inf 0.80 0.36 0.21 3

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025

      Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025
    """
    _arguments.check_one(threshold=threshold, budget=budget)
    if threshold is None:
        budget = _BUDGET if budget is None else budget
        _arguments.check_fraction(budget, "budget")
        trigger = triggers.budget(budget, ahead=_BOUNDS, behind=_BOUNDS)
    else:
        trigger = triggers.relative_momentum_change(threshold)
    if decision_interval != 1:
        trigger = triggers.at_intervals(trigger, decision_interval)
    synchronizer = _default_sync.sync_in(bits, synchronizer)
    inner = dion(
        learning_rate,
        _RANK if rank is None else rank,
        momentum,
        weight_decay,
        weight_decay_mask,
        mu_dtype,
        adam_learning_rate=adam_learning_rate,
        other_optimizer=other_optimizer,
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
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )
