"""CurvaDion: local Dion steps, synchronised when a momentum changes."""

from __future__ import annotations

from typing import Any

import jax
import optax

from curvadion_jax import _arguments, triggers
from curvadion_jax.matrices import _two_optimizers
from curvadion_jax.matrices._dion import dion
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.step._adaptive_sync import adaptive_sync
from curvadion_jax.synchronizers import Synchronizer
from curvadion_jax.synchronizers._reconcile import reconcile_in_few_bits

_RANK = 1.0
_BUDGET = 0.01  # the paper reports 99% less communication


def curvadion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    threshold: optax.ScalarOrSchedule | None = None,
    rank: int | float | None = None,
    momentum: optax.ScalarOrSchedule = 0.8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    budget: float | None = None,
    bits: int | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    synchronizer: Synchronizer | None = None,
    decision_interval: int | None = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """CurvaDion: local Dion steps, synchronised when a momentum changes.

    Each replica takes Dion steps on its own gradients. All replicas synchronise when
    the relative momentum change of any matrix, on any replica, exceeds a threshold
    (RMMC, relative maximum momentum change; see `triggers.relative_momentum_change`).

    Set `threshold`, or set `budget` to have the threshold adjusted during training. The
    default is ``budget=0.01``, since the paper reports 99% less communication. A budget
    keeps the number of syncs within one of even spacing (without `decision_interval`):
    RMMC only chooses the step in each period.

    .. note::
      In this library's benchmarks, syncs placed by RMMC have not given a lower loss
      than evenly spaced syncs of the same size. We recommend :func:`local_muon`.

    Every step is a Dion step on the local gradient. A sync adds a Nesterov outer step
    along the mean pseudo-gradient, sent in 2 bits with error feedback, after which the
    replicas are equal. In the paper's formula (`presets.paper`) a local step is a plain
    gradient step, a sync a Dion step with the mean gradient, and replicas still differ
    after it. `presets.authors_code` has the rules of the authors' code.

    Args:
      learning_rate: number or schedule.
      threshold: RMMC above which the replicas synchronise; a number or a schedule. It
        depends on the batch size, because RMMC is mostly gradient noise: to find one,
        train with a budget first. Cannot be combined with `budget`.
      rank: as for :func:`dion`, but None means full rank (1.0). A low rank reduces what
        Dion sends, and local steps send nothing.
      momentum: decay rate of the local momentum, as AdamW's b1; a number in [0, 1) or a
        schedule.
      weight_decay, weight_decay_mask, mu_dtype: as for :func:`dion`.
      budget: bytes to send, as a fraction of an all-reduce of all gradients in float32
        on every step. The bytes of votes are not counted.
      bits: bits per element sent: 8, 4, 2 or 1. None means 2. Not with `synchronizer`.
      adam_learning_rate, other_optimizer, dimension_numbers: as for :func:`dion`.
      synchronizer: replaces the sync described above.
      decision_interval: number of steps from one vote of the replicas to the next; None
        means 1. A vote costs a round trip over the slow link. A request waits up to
        ``decision_interval - 1`` steps, on which nothing is sent. There is at most one
        sync per interval, so a larger budget is not spent.
      before: as for :func:`adaptive_sync`, such as ``optax.clip_by_global_norm(1.0)``.
      mesh: as for :func:`adaptive_sync`. None means a single replica, on which the
        default sync sends nothing and takes no outer step: the result is Dion's. A
        mesh of one replica does take outer steps.
      specs: as for :func:`adaptive_sync`.

    Returns:
      An optimizer of rows, with state :class:`AdaptiveSyncState`.
      `curvadion_jax.metrics.read` reports syncs and bytes.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range, or both `threshold` and `budget`, both
        `bits` and `synchronizer`, or both `other_optimizer` and `adam_learning_rate`
        are given; at `init` and `update` as for :func:`adaptive_sync`.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = curvadion(0.01, threshold=0.3)
      >>> state, values = tx.init(params), []
      >>> update = jax.jit(tx.update)
      >>> for _ in range(4):  # constant gradients: RMMC decreases
      ...     updates, state = update(params, state, params)
      ...     values.append(f"{state.counters.value:.2g}")
      >>> print(*values, state.counters.syncs)
      3.4e+38 0.8 0.36 0.21 3

    References:
      Kumar, Jin and Quesnelle, `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    _arguments.check_exclusive(threshold=threshold, budget=budget)
    _arguments.check_exclusive(bits=bits, synchronizer=synchronizer)
    if budget is not None:
        _arguments.check_budget(budget)
    if threshold is None:
        budget = _BUDGET if budget is None else budget
        change = triggers.relative_momentum_change(
            triggers.FIRST_THRESHOLD, dimension_numbers
        )
        trigger = triggers.budget(budget, change)
    else:
        trigger = triggers.relative_momentum_change(threshold, dimension_numbers)
    if decision_interval is not None:
        trigger = triggers.at_intervals(trigger, decision_interval)
    synchronizer = synchronizer or reconcile_in_few_bits(bits, mesh)
    inner = dion(
        learning_rate,
        rank=_RANK if rank is None else rank,
        momentum=momentum,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        mu_dtype=mu_dtype,
        adam_learning_rate=adam_learning_rate,
        other_optimizer=other_optimizer,
        dimension_numbers=dimension_numbers,
    )
    return adaptive_sync(inner, trigger, synchronizer, mesh, before=before, specs=specs)
