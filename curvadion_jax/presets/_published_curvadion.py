"""CurvaDion as it was published: the paper's formula, and the authors' code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _arguments,
    _momentum,
    _partition,
    synchronizers,
    triggers,
)
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import dion


def paper(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule = 0.3,
    local_learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """CurvaDion's published formula.

    Of the paper we could read the abstract and the beginning of the introduction; the
    rest is known at second hand. :func:`curvadion` has the same parts with a sync that
    brings replicas together.

    Momentum m <- mu m + g without error feedback; if the relative momentum change of
    any layer exceeds the threshold, a Dion step with the mean gradient; otherwise a
    plain local gradient step, theta - eta_local g, that leaves Q as it is.

    Args:
      learning_rate: a number or a schedule.
      threshold: tau, a number or a schedule.
      local_learning_rate: eta_local; None is `learning_rate`.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.
      dimension_numbers: as for :func:`dion`.
      **dion_arguments: other arguments of :func:`dion`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> tx = paper(0.01, threshold=0.2, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> int(state.metrics.steps)
      0

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    if local_learning_rate is None:
        local_learning_rate = learning_rate
    _arguments.check_number(local_learning_rate, "local_learning_rate")
    at_syncs = dion(
        learning_rate,
        dimension_numbers=dimension_numbers,
        error_feedback=False,
        **dion_arguments,
    )
    return adaptive_sync(
        _alternating(at_syncs, optax.sgd(local_learning_rate)),
        triggers.relative_momentum_change(threshold),
        _with_mean_gradients(),
        axis_name,
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )


def _alternating(
    at_syncs: optax.GradientTransformationExtraArgs,
    between: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for sync steps, which accumulates its momentum on all others."""

    def init(params):
        return at_syncs.init(params), between.init(params)

    def update(updates, state, params=None, *, synchronised=False, **extra_args):
        of_syncs, of_others = state
        others, of_others = between.update(updates, of_others, params)
        if not synchronised:
            extra_args.setdefault("momentum_only", True)
        updates, of_syncs = at_syncs.update(updates, of_syncs, params, **extra_args)
        return updates if synchronised else others, (of_syncs, of_others)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_mean_gradients() -> synchronizers.Synchronizer:
    """`average_gradients`, which tells the inner optimizer that it is a sync."""
    plain = synchronizers.average_gradients()

    def sync(local, state, group):
        take = functools.partial(local.take, synchronised=True)
        return plain.sync(local._replace(take=take), state, group)

    return plain._replace(sync=sync)


def _all_momenta(inner_state: optax.OptState) -> optax.Params:
    """Dion's momenta, and those of the other parameters' optimizer in their place."""
    others = _momentum.value_of(inner_state, "mu")
    if others is None:
        raise ValueError(
            "the rules of the authors' code look at the momenta of all parameters: "
            "other_optimizer must keep its own as `mu`, such as optax.lion"
        )
    (of_dion,) = _momentum.dion_states(inner_state)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(
        lambda momentum, mu: mu if is_masked(momentum) else momentum,
        of_dion.momentum,
        others,
        is_leaf=is_masked,
    )


def authors_code(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule = 0.3,
    *,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    other_optimizer: optax.GradientTransformation | None = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """The rules of the CurvaDion authors' published PyTorch code.

    The change compares the norm of M + G with that of M after error feedback, over all
    parameters, those of the other optimizer (Lion) included. Momenta of a norm up to
    0.1 are left out, so that the first step does not synchronise. A sync averages full
    gradients; a local step is a full Dion step. Here replicas do step alone on those.

    Args:
      learning_rate: a number or a schedule.
      threshold: tau, a number or a schedule.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.
      dimension_numbers: as for :func:`dion`.
      other_optimizer: optimizer with a momentum `mu` for the other parameters; None
        is `optax.lion` with the same learning rate, b1 = 0.95, b2 = 0.98 and no weight
        decay. (The authors divide the output head's rate by the root of the width.)
      **dion_arguments: other arguments of :func:`dion`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> tx = authors_code(0.01, threshold=0.2, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> int(state.metrics.steps)
      0

    References:
      `Bhavkumar21/CurvaDion <https://github.com/Bhavkumar21/CurvaDion>`_,
      optimizers/curvadion.py and train.py
    """
    if other_optimizer is None:
        other_optimizer = optax.lion(learning_rate, b1=0.95, b2=0.98, weight_decay=0.0)
    change = triggers.relative_momentum_change(
        threshold, floor=0.1, momentum_fn=lambda momenta: momenta, remember=False
    )

    def decide(observation, state):
        momenta = _all_momenta(observation.inner_state)
        plus_gradients = jax.tree.map(jnp.add, momenta, observation.gradients)
        seen = observation._replace(
            inner_state=momenta, next_inner_state=lambda: plus_gradients
        )
        decision, state = change.decide(seen, state)
        return decision._replace(fire=decision.fire & (observation.steps > 0)), state

    return adaptive_sync(
        dion(
            learning_rate,
            dimension_numbers=dimension_numbers,
            other_optimizer=other_optimizer,
            **dion_arguments,
        ),
        triggers.Trigger(change.init, decide),
        synchronizers.average_gradients(),
        axis_name,
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )
