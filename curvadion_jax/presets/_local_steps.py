"""Methods that average parameters every k steps."""

from typing import Any

import jax
import optax

from curvadion_jax import _arguments, _partition, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._muon import muon, muon_adamw


def local_sgd(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 10,
    momentum: float = 0.9,
    *,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum on every replica, parameters averaged every k steps.

    Args:
      learning_rate: a number or a schedule.
      k: period in steps.
      momentum: decay rate of the momentum, which stays local.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> tx = local_sgd(0.1, k=10, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> int(state.metrics.steps)
      0

    References:
      Stich, `Local SGD Converges Fast and Communicates Little
      <https://arxiv.org/abs/1805.09767>`_, 2018
    """
    _arguments.check_numbers(learning_rate=learning_rate)
    _arguments.check_number(momentum, "momentum", below=1)
    return adaptive_sync(
        optax.sgd(learning_rate, momentum),
        triggers.every_k(k),
        synchronizers.reconcile(momentum=False),
        axis_name,
        dimension_numbers=_no_matrices,
        allow_unchecked=allow_unchecked,
    )


def diloco(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.9,
    *,
    weight_decay: float = 0.0,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: AdamW on every replica, a Nesterov outer step every k steps.

    Args:
      learning_rate: AdamW's, a number or a schedule.
      k: period in steps (H).
      outer_learning_rate: of the Nesterov step.
      outer_momentum: of the Nesterov step.
      weight_decay: AdamW's.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> tx = diloco(1e-3, k=30, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> int(state.metrics.steps)
      0

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    _arguments.check_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    outer = _nesterov(outer_learning_rate, outer_momentum)
    return adaptive_sync(
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay),
        triggers.every_k(k),
        synchronizers.reconcile(outer, momentum=False),
        axis_name,
        dimension_numbers=_no_matrices,
        allow_unchecked=allow_unchecked,
    )


def muloco(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.6,
    *,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.0,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo with Muon (`optax.contrib.muon`) as the inner optimizer.

    Args:
      learning_rate: Muon's, a number or a schedule.
      k: period in steps (H).
      outer_learning_rate: of the Nesterov step.
      outer_momentum: of the Nesterov step.
      adam_learning_rate: of the other parameters' AdamW; None is `learning_rate`.
      weight_decay: Muon's.
      dimension_numbers: which parameters are matrices, as for :func:`dion`.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> tx = muloco(0.01, k=30, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> int(state.metrics.steps)
      0

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    _arguments.check_numbers(
        learning_rate=learning_rate, adam_learning_rate=rate, weight_decay=weight_decay
    )
    inner = _partition.optimizer(
        lambda numbers: muon(learning_rate, numbers, weight_decay=weight_decay),
        muon_adamw(rate),
        dimension_numbers,
    )
    outer = _nesterov(outer_learning_rate, outer_momentum)
    return adaptive_sync(
        inner,
        triggers.every_k(k),
        synchronizers.reconcile(outer, momentum=False),
        axis_name,
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )


def _nesterov(learning_rate: Any, momentum: Any) -> optax.GradientTransformation:
    """The outer step of DiLoCo and MuLoCo."""
    _arguments.check_number(learning_rate, "outer_learning_rate")
    _arguments.check_number(momentum, "outer_momentum", below=1)
    return optax.sgd(learning_rate, momentum, nesterov=True)


def _no_matrices(params: optax.Params) -> Any:
    """Dimension numbers for optimizers that know no matrices."""
    return jax.tree.map(lambda _: None, params)
