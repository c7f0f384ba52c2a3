"""CurvaDion as its authors published it: the paper's formula, and their code's rules.

Public as `presets.paper` and `presets.authors_code`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _dtypes, synchronizers, triggers
from curvadion_jax.matrices import _dion, _momentum, _two_optimizers
from curvadion_jax.matrices._dion import dion
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.step._adaptive_sync import adaptive_sync
from curvadion_jax.triggers import Measured, Trigger


def paper(
    learning_rate: optax.ScalarOrSchedule,
    *,
    threshold: optax.ScalarOrSchedule = 0.3,
    local_learning_rate: optax.ScalarOrSchedule | None = None,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """CurvaDion's published formula.

    Momentum m <- mu m + g without error feedback. If the relative momentum change of
    any layer exceeds `threshold`, a Dion step with the mean gradient; otherwise a plain
    local gradient step, which leaves Q as it is. Replicas drift apart;
    :func:`curvadion_jax.curvadion` synchronises them.

    RMMC is the authors' README's, the step that of the catalogue `zij
    <https://github.com/junaidaliop/zij>`_, docs/math/curvadion. The paper was read in
    part.

    Args:
      learning_rate: of the Dion steps.
      threshold: RMMC above which all synchronise; a number or a schedule. 0.3 is one of
        the authors' three (0.1, 0.3, 0.9); it depends on the batch size.
      local_learning_rate: of the plain local steps; None means `learning_rate`.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.
      **dion_arguments: others of :func:`curvadion_jax.dion`.

    Returns:
      An optimizer of rows. A sync sends all gradients in float32.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range; at `init` and `update` as for
        :func:`curvadion_jax.adaptive_sync`.

    Example:
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = paper(0.01, threshold=0.5, mesh=mesh)
      >>> params = {"kernel": jnp.ones((2, 8, 8))}  # two equal rows
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(6):  # constant gradients: RMMC decreases
      ...     updates, state = update(params, state, params)
      >>> int(state.counters.syncs)
      2

    References:
      Kumar, Jin and Quesnelle, `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    at_syncs = dion(
        learning_rate,
        dimension_numbers=dimension_numbers,
        error_feedback=False,
        **dion_arguments,
    )
    if local_learning_rate is None:
        local_learning_rate = learning_rate
    _arguments.check_numbers(local_learning_rate=local_learning_rate)
    between = optax.sgd(local_learning_rate)

    def sync(take, gradients, inner_state, state, residual, part):
        mean = part.mean(gradients)
        return *take(mean, inner_state, synchronised=True), state, residual

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
    *,
    threshold: optax.ScalarOrSchedule = 0.3,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """The rules of the CurvaDion authors' published PyTorch code.

    The trigger compares the norm of M + G with that of M after error feedback, of every
    parameter whose M has a norm above 0.1. A sync averages full gradients; a local step
    is a full Dion step. Unlike in their training script, replicas do take local steps.

    Args:
      learning_rate: of Dion, and of the default `other_optimizer`.
      threshold: a number or a schedule. Their runs have 0.1, 0.3 and 0.9.
      other_optimizer: trains all other parameters; it needs a momentum `mu`. None means
        `optax.lion` with b1 = 0.9, b2 = 0.95 and no weight decay: their optimizer's
        defaults, which stay in force because it ignores the `betas` of their script.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.
      **dion_arguments: others of :func:`curvadion_jax.dion`.

    Returns:
      An optimizer of rows.

    Raises:
      ValueError: if `other_optimizer` keeps no momentum `mu`.

    Example:
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = authors_code(0.01, threshold=0.3, mesh=mesh)
      >>> params = {"kernel": jnp.ones((2, 8, 8)), "bias": jnp.ones((2, 8))}
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> syncs = []
      >>> for _ in range(4):  # the first step has no momentum to compare with
      ...     updates, state = update(params, state, params)
      ...     syncs.append(int(state.counters.syncs))
      >>> syncs
      [0, 1, 2, 3]

    References:
      `Bhavkumar21/CurvaDion <https://github.com/Bhavkumar21/CurvaDion>`_, commit
      50dacf7, optimizers/curvadion.py and train.py
    """
    _arguments.check_numbers(learning_rate=learning_rate, threshold=threshold)
    if other_optimizer is None:
        other_optimizer = optax.lion(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0)

    def look(seen, remembered):
        momenta, gradients = (
            [_dtypes.at_least_float32(x) for x in jax.tree.leaves(tree)]
            for tree in (_all_momenta(seen.inner_state), seen.gradients)
        )
        if not momenta:
            return Measured(0.0), remembered
        old = jnp.stack([optax.tree.norm(m) for m in momenta])
        new = [m + g for m, g in zip(momenta, gradients, strict=True)]
        new = jnp.stack([optax.tree.norm(m) for m in new])
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
    (of_dion,) = _dion.states_of(inner_state)
    return jax.tree.map(
        lambda momentum, mu: mu if isinstance(momentum, optax.MaskedNode) else momentum,
        of_dion.momentum,
        others,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
