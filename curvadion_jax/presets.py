"""Published methods as points in one space: inner optimizer, trigger, synchronizer.

Each is a few lines of the parts, to be read as much as called. All return an optimizer
of rows with state :class:`curvadion_jax.AdaptiveSyncState`. Learning rates are numbers
or schedules; outer ones count syncs. `before`, `mesh` and `specs` are those of
:func:`curvadion_jax.adaptive_sync`, and `dimension_numbers` and ``**dion_arguments``
those of :func:`curvadion_jax.dion`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _momentum, _partition, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import dion
from curvadion_jax._muon import muon
from curvadion_jax._rows import Replicas
from curvadion_jax.triggers import Measured, Trigger

__all__ = [
    "authors_code",
    "diloco",
    "local_sgd",
    "muloco",
    "paper",
    "synchronous_adamw",
    "synchronous_dion",
    "synchronous_muon",
]


def synchronous_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.0,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW on the mean gradient of every step: training on one big batch.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = synchronous_adamw(1e-3, mesh=replicas.simulated(2))

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019
    """
    return adaptive_sync(
        optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay),
        triggers.always(),
        synchronizers.average_gradients(),
        mesh,
        before=before,
        specs=specs,
    )


def synchronous_muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule = 0.95,
    *,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon on the mean gradient of every step: training on one big batch.

    AdamW with `adam_learning_rate`, by default `learning_rate`, trains all others.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = synchronous_muon(0.02, mesh=replicas.simulated(2))

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024
    """
    return adaptive_sync(
        _muon(
            learning_rate, momentum, adam_learning_rate, weight_decay, dimension_numbers
        ),
        triggers.always(),
        synchronizers.average_gradients(),
        mesh,
        before=before,
        specs=specs,
    )


def synchronous_dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Dion that averages its factors over the replicas on every step.

    Example:
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = synchronous_dion(0.01, rank=0.25, mesh=mesh)
      >>> state = tx.init({"kernel": jnp.ones((2, 4, 8))})  # two equal rows
      >>> state.common[0]["kernel"].shape  # Q
      (4, 1)

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, 2025
    """
    return adaptive_sync(
        dion(learning_rate, dimension_numbers=dimension_numbers, **dion_arguments),
        triggers.always(),
        synchronizers.average_factors(dimension_numbers),
        mesh,
        before=before,
        specs=specs,
    )


def local_sgd(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 10,
    momentum: float = 0.9,
    *,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with a local momentum; parameters are averaged every k steps.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = local_sgd(0.1, k=10, mesh=replicas.simulated(2))

    References:
      Stich, `Local SGD Converges Fast and Communicates Little
      <https://arxiv.org/abs/1805.09767>`_, 2018
    """
    return adaptive_sync(
        optax.sgd(learning_rate, momentum),
        triggers.every_k(k),
        synchronizers.reconcile(),
        mesh,
        before=before,
        specs=specs,
    )


def diloco(
    learning_rate: optax.ScalarOrSchedule,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.9,
    *,
    weight_decay: float = 0.0,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: local AdamW, and a Nesterov outer step every k steps.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = diloco(1e-3, k=30, mesh=replicas.simulated(2))

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    return adaptive_sync(
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay),
        triggers.every_k(k),
        synchronizers.reconcile(
            optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
        ),
        mesh,
        before=before,
        specs=specs,
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
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, as in `optax.contrib.muon`.

    AdamW with `adam_learning_rate`, by default `learning_rate`, trains all others.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = muloco(0.01, k=30, mesh=replicas.simulated(2))

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    return adaptive_sync(
        _muon(learning_rate, 0.95, adam_learning_rate, weight_decay, dimension_numbers),
        triggers.every_k(k),
        synchronizers.reconcile(
            optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
        ),
        mesh,
        before=before,
        specs=specs,
    )


def _muon(
    learning_rate, momentum, adam_learning_rate, weight_decay, dimension_numbers
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon`, with its defaults."""
    return _partition.optimizer(
        lambda numbers: muon(
            learning_rate, numbers, beta=momentum, weight_decay=weight_decay
        ),
        _partition.other_optimizer(
            None, learning_rate, adam_learning_rate, 1e-8, nesterov=True
        ),
        dimension_numbers,
    )


def paper(
    learning_rate: optax.ScalarOrSchedule,
    threshold: optax.ScalarOrSchedule = 0.3,
    local_learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """CurvaDion's published formula, as far as we know it.

    Momentum m <- mu m + g without error feedback. If the relative momentum change of
    any layer exceeds `threshold`, a Dion step with the mean gradient; otherwise a plain
    local gradient step with `local_learning_rate` (None for `learning_rate`), which
    leaves Q as it is. Replicas drift apart; :func:`curvadion_jax.curvadion`
    synchronises them.

    Example:
      >>> from curvadion_jax import replicas
      >>> tx = paper(0.01, threshold=0.2, mesh=replicas.simulated(2))

    References:
      Kumar, Jin and Quesnelle, `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    at_syncs = dion(
        learning_rate,
        dimension_numbers=dimension_numbers,
        error_feedback=False,
        **dion_arguments,
    )
    between = optax.sgd(
        learning_rate if local_learning_rate is None else local_learning_rate
    )

    def sync(take, gradients, inner_state, common, part):
        mean = part.mean(gradients)
        return *take(mean, inner_state, synchronised=True), common

    return adaptive_sync(
        _alternating(at_syncs, between),
        triggers.relative_momentum_change(threshold, dimension_numbers),
        synchronizers.WithinStep(sync, synchronizers.average_gradients().payload),
        mesh,
        before=before,
        specs=specs,
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
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
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
      >>> from curvadion_jax import replicas
      >>> tx = authors_code(0.01, threshold=0.2, mesh=replicas.simulated(2))

    References:
      `Bhavkumar21/CurvaDion <https://github.com/Bhavkumar21/CurvaDion>`_,
      optimizers/curvadion.py and train.py
    """
    if other_optimizer is None:
        other_optimizer = optax.lion(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0)

    def look(seen, remembered):
        old = _all_momenta(seen.inner_state)
        new = jax.tree.map(jnp.add, old, seen.gradients)
        old, new = (
            jnp.stack([optax.tree.norm(m) for m in jax.tree.leaves(momenta)])
            for momenta in (old, new)
        )
        change = jnp.where(old < 0.1, 0, jnp.abs(new - old) / old)
        # There are no momenta to compare with on the first step.
        change = jnp.where(seen.clock.steps == 0, 0, change)
        return Measured(jnp.max(change), jnp.argmax(change)), remembered

    return adaptive_sync(
        dion(
            learning_rate,
            dimension_numbers=dimension_numbers,
            other_optimizer=other_optimizer,
            **dion_arguments,
        ),
        Trigger(
            look=look,
            threshold=lambda clock, _: _arguments.at_step(threshold, clock.steps),
        ),
        synchronizers.average_gradients(),
        mesh,
        before=before,
        specs=specs,
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
