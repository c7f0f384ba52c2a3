"""Published methods as points in one space: inner optimizer, trigger, synchronizer.

Each is a few lines of the parts, to be read as much as called, and returns an
optimizer with state :class:`AdaptiveSyncState`. Learning rates are numbers or
schedules; outer ones count syncs. ``axis_name`` is the name of the replica axis, None
for one replica; ``dimension_numbers`` and ``**dion_arguments`` are :func:`dion`'s.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _momentum, _partition, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import dion
from curvadion_jax._muon import muon

__all__ = ["authors_code", "diloco", "local_sgd", "muloco", "paper", "synchronous_dion"]


def synchronous_dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    axis_name: str | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Dion that averages its factors over the replicas on every step.

    Example:
      >>> tx = synchronous_dion(0.01, rank=0.25, axis_name="replica")
      >>> state = tx.init({"kernel": jnp.ones((4, 8))})
      >>> state.sync_state.common[0]["kernel"].shape  # Q
      (4, 1)
    """
    return adaptive_sync(
        dion(learning_rate, dimension_numbers=dimension_numbers, **dion_arguments),
        triggers.always(),
        synchronizers.average_factors(),
        axis_name,
        dimension_numbers=dimension_numbers,
    )


def local_sgd(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 10,
    momentum: float = 0.9,
    *,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with a local momentum; parameters are averaged every k steps.

    Example:
      >>> tx = local_sgd(0.1, k=10, axis_name="replica")

    References:
      Stich, `Local SGD Converges Fast and Communicates Little
      <https://arxiv.org/abs/1805.09767>`_, 2018
    """
    return _every(k, optax.sgd(learning_rate, momentum), None, axis_name)


def diloco(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.9,
    *,
    weight_decay: float = 0.0,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: local AdamW, and a Nesterov outer step every k steps.

    Example:
      >>> tx = diloco(1e-3, k=30, axis_name="replica")

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    inner = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay)
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    return _every(k, inner, outer, axis_name)


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
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, as in `optax.contrib.muon`.

    AdamW with `adam_learning_rate`, by default `learning_rate`, trains all others.

    Example:
      >>> tx = muloco(0.01, k=30, axis_name="replica")

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    inner = _partition.optimizer(
        lambda numbers: muon(learning_rate, numbers, weight_decay=weight_decay),
        _partition.other_optimizer(
            None, learning_rate, adam_learning_rate, 1e-8, nesterov=True
        ),
        dimension_numbers,
    )
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    return _every(k, inner, outer, axis_name, dimension_numbers)


def _every(
    k: int,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None,
    axis_name: str | None,
    dimension_numbers: _partition.DimensionNumbersOrFn = lambda params: None,
) -> optax.GradientTransformationExtraArgs:
    """An outer step along the mean pseudo-gradient after every k local steps."""
    return adaptive_sync(
        inner,
        triggers.every_k(k),
        synchronizers.reconcile(outer),
        axis_name,
        dimension_numbers=dimension_numbers,
    )


def paper(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule = 0.3,
    local_learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    axis_name: str | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """CurvaDion's published formula, as far as we know it.

    Momentum m <- mu m + g without error feedback. If the relative momentum change of
    any layer exceeds `threshold`, a Dion step with the mean gradient; otherwise a plain
    local gradient step with `local_learning_rate` (None for `learning_rate`), which
    leaves Q as it is. Replicas drift apart; :func:`curvadion` synchronises them.

    Example:
      >>> tx = paper(0.01, threshold=0.2, axis_name="replica")

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    if local_learning_rate is None:
        local_learning_rate = learning_rate
    at_syncs = dion(
        learning_rate,
        dimension_numbers=dimension_numbers,
        error_feedback=False,
        **dion_arguments,
    )

    def sync(local, state, group):
        mean = local.mean(local.gradients, group)
        return *local.take(mean, local.inner_state, synchronised=True), state

    return adaptive_sync(
        _alternating(at_syncs, optax.sgd(local_learning_rate)),
        triggers.relative_momentum_change(threshold),
        synchronizers.average_gradients()._replace(sync=sync),
        axis_name,
        dimension_numbers=dimension_numbers,
    )


def _alternating(
    at_syncs: optax.GradientTransformationExtraArgs,
    between: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Steps by one optimizer at syncs and by another in between.

    On local steps the first one only accumulates its momentum.
    """

    init = lambda params: (at_syncs.init(params), between.init(params))

    def update(updates, state, params=None, *, synchronised=False, **extra_args):
        sync_state, local_state = state
        local, local_state = between.update(updates, local_state, params)
        if not synchronised:
            extra_args.setdefault("momentum_only", True)
        synced, sync_state = at_syncs.update(updates, sync_state, params, **extra_args)
        return synced if synchronised else local, (sync_state, local_state)

    return optax.GradientTransformationExtraArgs(init, update)


def authors_code(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule = 0.3,
    *,
    axis_name: str | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    other_optimizer: optax.GradientTransformation | None = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """The rules of the CurvaDion authors' published PyTorch code.

    The trigger compares the norm of M + G with that of M after error feedback, of every
    parameter whose M has a norm above 0.1. A sync averages full gradients; a local step
    is a full Dion step. Unlike in their training script, replicas do take local steps.

    `other_optimizer` needs a momentum `mu`. None means `optax.lion` with the same
    learning rate, b1 = 0.9, b2 = 0.95 and no weight decay: their optimizer's defaults,
    which stay in force because it ignores the `betas` of their script.

    Example:
      >>> tx = authors_code(0.01, threshold=0.2, axis_name="replica")

    References:
      `Bhavkumar21/CurvaDion <https://github.com/Bhavkumar21/CurvaDion>`_,
      optimizers/curvadion.py and train.py
    """
    if other_optimizer is None:
        other_optimizer = optax.lion(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0)

    def decide(seen):
        old = _all_momenta(seen.inner_state)
        new = jax.tree.map(jnp.add, old, seen.gradients)
        old, new = (
            jnp.stack([optax.tree.norm(m) for m in jax.tree.leaves(momenta)])
            for momenta in (old, new)
        )
        change = jnp.where(old < 0.1, 0, jnp.abs(new - old) / old)
        value, layer = jnp.max(change), jnp.argmax(change)
        limit = _arguments.at_step(threshold, seen.steps)
        # There are no momenta to compare with on the first step.
        fire = ~(value <= limit) & (seen.steps > 0)
        return triggers.decision(fire, value, limit, layer)

    return adaptive_sync(
        dion(
            learning_rate,
            dimension_numbers=dimension_numbers,
            other_optimizer=other_optimizer,
            **dion_arguments,
        ),
        triggers.stateless(decide),
        synchronizers.average_gradients(),
        axis_name,
        dimension_numbers=dimension_numbers,
    )


def _all_momenta(inner_state: optax.OptState) -> optax.Params:
    """Dion's momenta, and those of the other parameters' optimizer in their place."""
    others = _momentum.value_of(inner_state, "mu")
    if others is None:
        raise ValueError(
            "authors_code looks at the momenta of all parameters, and other_optimizer "
            "keeps none as `mu`. Pass one that does, such as optax.lion."
        )
    (of_dion,) = _momentum.dion_states(inner_state)
    return jax.tree.map(
        lambda momentum, mu: mu if isinstance(momentum, optax.MaskedNode) else momentum,
        of_dion.momentum,
        others,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
