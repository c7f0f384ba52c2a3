"""Published methods as points in one space: inner optimizer, trigger, synchronizer.

Each is a few lines of the parts, to be read as much as called. All return an optimizer
of rows with state :class:`curvadion_jax.AdaptiveSyncState`. In all of them weight decay
is decoupled, times the learning rate, and a learning rate is a number or a schedule of
steps; an outer one is of syncs.
"""

from __future__ import annotations

from typing import Any

import optax

from curvadion_jax import _arguments, compressors, synchronizers, triggers
from curvadion_jax.matrices import _adamw_for_the_rest, _two_optimizers
from curvadion_jax.matrices._dion import dion
from curvadion_jax.matrices._muon import muon
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.methods._authors import authors_code, paper
from curvadion_jax.step._adaptive_sync import adaptive_sync

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

    Args:
      learning_rate: of all parameters.
      b1, b2: decay rates of the two moments. 0.9 and 0.95 are usual for language
        models; `optax.adamw` has 0.9 and 0.999.
      weight_decay: of all parameters.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.

    Returns:
      An optimizer of rows. All replicas stay equal.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range; at `init` and `update` as for
        :func:`curvadion_jax.adaptive_sync`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = synchronous_adamw(0.1, mesh=mesh)
      >>> params = replicas.replicate({"w": jnp.zeros(1)}, mesh)
      >>> loss_fn = lambda params, x: jnp.sum((params["w"] - x) ** 2)
      >>> differentiate = replicas.map(jax.value_and_grad(loss_fn), mesh)
      >>> state, x = tx.init(params), jnp.array([1.0, 3.0])  # a number for each replica
      >>> for step in range(3):
      ...     loss, gradients = differentiate(params, x)
      ...     updates, state = tx.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss.mean():.2f}")
      5.00
      4.61
      4.24

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019
    """
    _arguments.check_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    _arguments.check_numbers(below=1, schedules=False, b1=b1, b2=b2)
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
    *,
    momentum: optax.ScalarOrSchedule = 0.95,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    compressor: compressors.Compressor | None = None,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon on the mean gradient of every step: training on one big batch.

    Args:
      learning_rate: of the matrices.
      momentum: decay rate, in [0, 1); a number or a schedule. 0.95 is Jordan et al.'s.
      adam_learning_rate: of AdamW (b1 = 0.9, b2 = 0.95), which trains all other
        parameters. None means `learning_rate`.
      weight_decay: of the matrices.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      compressor: form in which gradients are sent, with error feedback, such as
        ``compressors.quantize(4)``, which sends 13% of the bytes. None means at least
        float32.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.

    Returns:
      An optimizer of rows. All replicas stay equal, and take the steps of
      `optax.contrib.muon` with the mean gradient, or with its code.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument is out of range; at `init` and `update` as for
        :func:`curvadion_jax.adaptive_sync`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = synchronous_muon(0.5, mesh=mesh)
      >>> params = replicas.replicate({"kernel": jnp.zeros((2, 2))}, mesh)
      >>> target = jnp.array([2 * jnp.eye(2), 4 * jnp.eye(2)])  # one for each replica
      >>> loss_fn = lambda params, x: jnp.mean((params["kernel"] - x) ** 2)
      >>> differentiate = replicas.map(jax.value_and_grad(loss_fn), mesh)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for step in range(3):
      ...     loss, gradients = differentiate(params, target)
      ...     updates, state = update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"{loss.mean():.1f}")
      5.0
      3.5
      2.3

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024
    """
    return adaptive_sync(
        _muon(
            learning_rate, momentum, adam_learning_rate, weight_decay, dimension_numbers
        ),
        triggers.always(),
        synchronizers.average_gradients(compressor),
        mesh,
        before=before,
        specs=specs,
    )


def synchronous_dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Dion that averages its factors over the replicas on every step.

    Args:
      learning_rate: of the matrices.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.
      **dion_arguments: of :func:`curvadion_jax.dion`, such as `rank` (0.25 there),
        `momentum` (0.95, the paper's) and `adam_learning_rate`.

    Returns:
      An optimizer of rows. Momenta differ between replicas, parameters do not.

    Raises:
      TypeError, ValueError: as for :func:`curvadion_jax.dion`; at `init` and `update`
        as for :func:`curvadion_jax.adaptive_sync`.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = synchronous_dion(0.01, rank=0.25, mesh=mesh)
      >>> state = tx.init({"kernel": jnp.ones((2, 4, 8))})  # two equal rows
      >>> state.common.sync_state[0]["kernel"].shape  # Q
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
    *,
    k: int = 10,
    momentum: float = 0.9,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Local SGD: SGD with a local momentum; parameters are averaged every k steps.

    Args:
      learning_rate: of all parameters.
      k: local steps per sync, at least 1. The paper's H; it is a free parameter there.
      momentum: of each replica, in [0, 1), which syncs leave as it is. 0.9 is the usual
        one; the paper's method has none (0).
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.

    Returns:
      An optimizer of rows. A sync sends float32 pseudo-gradients, 1/k of the bytes of
      synchronous training.

    Raises:
      TypeError: if `k` is no int, or another argument no number.
      ValueError: if `k` is below 1, or another argument out of range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = local_sgd(0.25, k=2, momentum=0.0, mesh=mesh)
      >>> params = replicas.replicate({"w": jnp.zeros(1)}, mesh)
      >>> state, x = tx.init(params), jnp.array([1.0, 3.0])  # a number for each replica
      >>> loss_fn = lambda params, x: jnp.sum((params["w"] - x) ** 2)
      >>> differentiate = replicas.map(jax.grad(loss_fn), mesh)
      >>> for _ in range(4):
      ...     updates, state = tx.update(differentiate(params, x), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params["w"].ravel().tolist())
      [0.5, 1.5]
      [1.5, 1.5]
      [1.25, 2.25]
      [1.875, 1.875]

    References:
      Stich, `Local SGD Converges Fast and Communicates Little
      <https://arxiv.org/abs/1805.09767>`_, 2018
    """
    _arguments.check_numbers(learning_rate=learning_rate)
    _arguments.check_numbers(below=1, schedules=False, momentum=momentum)
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
    *,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.9,
    weight_decay: float = 0.0,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: AdamW locally, and an outer Nesterov step every `k` steps.

    Each replica takes `k` AdamW steps (H in the paper). Then all replicas average their
    pseudo-gradients in float32, without compression, and take the outer step.

    Args:
      learning_rate: of AdamW (b1 = 0.9, b2 = 0.95), for all parameters.
      k: local steps per sync, at least 1. The paper used 500; 30 is the period of the
        MuLoCo paper's comparisons, and sends 1/30 of the bytes of synchronous training.
      outer_learning_rate: of the outer step; 0.7 is the paper's.
      outer_momentum: Nesterov momentum of the outer step, in [0, 1); 0.9 is the
        paper's.
      weight_decay: of all parameters; the paper used 0.1.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.

    Returns:
      An optimizer of rows.

    Raises:
      TypeError: if `k` is no int, or another argument no number.
      ValueError: if `k` is below 1, or another argument out of range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = diloco(0.1, k=2, mesh=mesh)
      >>> params = replicas.replicate({"w": jnp.zeros(1)}, mesh)
      >>> state, x = tx.init(params), jnp.array([1.0, 3.0])  # a number for each replica
      >>> loss_fn = lambda params, x: jnp.sum((params["w"] - x) ** 2)
      >>> differentiate = replicas.map(jax.value_and_grad(loss_fn), mesh)
      >>> for step in range(4):
      ...     loss, gradients = differentiate(params, x)
      ...     updates, state = tx.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"loss {loss.mean():.2f}, {state.counters.syncs} syncs")
      loss 5.00, 0 syncs
      loss 4.61, 1 syncs
      loss 4.01, 1 syncs
      loss 3.67, 2 syncs

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    _arguments.check_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    return adaptive_sync(
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay),
        triggers.every_k(k),
        synchronizers.reconcile(_nesterov(outer_learning_rate, outer_momentum)),
        mesh,
        before=before,
        specs=specs,
    )


def muloco(
    learning_rate: optax.ScalarOrSchedule,
    *,
    k: int = 30,
    outer_learning_rate: optax.ScalarOrSchedule = 0.7,
    outer_momentum: float = 0.6,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.0,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    before: optax.GradientTransformation | None = None,
    mesh: Replicas = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """MuLoCo: DiLoCo with Muon as the inner optimizer, as in `optax.contrib.muon`.

    Pseudo-gradients are sent in float32. In 2 bits, as in the paper's headline:
    :func:`curvadion_jax.local_muon` with
    ``synchronizer=reconcile(optax.sgd(0.7, 0.6, nesterov=True),
    compressor=quantize(2))``.

    Args:
      learning_rate: of Muon, for the matrices.
      k: local steps per sync, at least 1; 30 is the paper's.
      outer_learning_rate, outer_momentum: of the outer Nesterov step; a number or a
        schedule of syncs, and a number in [0, 1). The authors' values depend on the
        number of replicas: 0.7 and 0.6 for one, 0.9 and 0.8 for eight, 1.0 and 0.9 for
        sixteen (their configurations, read on 2026-11-27). The defaults are the first.
      adam_learning_rate: of AdamW (b1 = 0.9, b2 = 0.95), which trains all other
        parameters. None means `learning_rate`.
      weight_decay: of the matrices.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      before, mesh, specs: as for :func:`curvadion_jax.adaptive_sync`.

    Returns:
      An optimizer of rows. The local momentum is 0.95, as in `optax.contrib.muon`; the
      authors' configurations have 0.9.

    Raises:
      TypeError: if `k` is no int, or another argument no number.
      ValueError: if `k` is below 1, or another argument out of range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> tx = muloco(0.5, k=2, mesh=mesh)
      >>> params = replicas.replicate({"kernel": jnp.zeros((2, 2))}, mesh)
      >>> target = jnp.array([2 * jnp.eye(2), 4 * jnp.eye(2)])  # one for each replica
      >>> loss_fn = lambda params, x: jnp.mean((params["kernel"] - x) ** 2)
      >>> differentiate = replicas.map(jax.value_and_grad(loss_fn), mesh)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for step in range(3):
      ...     loss, gradients = differentiate(params, target)
      ...     updates, state = update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(f"loss {loss.mean():.1f}, {state.counters.syncs} syncs")
      loss 5.0, 0 syncs
      loss 3.5, 1 syncs
      loss 2.0, 1 syncs

    References:
      Therien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025
    """
    return adaptive_sync(
        _muon(learning_rate, 0.95, adam_learning_rate, weight_decay, dimension_numbers),
        triggers.every_k(k),
        synchronizers.reconcile(_nesterov(outer_learning_rate, outer_momentum)),
        mesh,
        before=before,
        specs=specs,
    )


def _nesterov(
    outer_learning_rate: Any, outer_momentum: Any
) -> optax.GradientTransformation:
    _arguments.check_numbers(outer_learning_rate=outer_learning_rate)
    _arguments.check_numbers(below=1, schedules=False, outer_momentum=outer_momentum)
    return optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)


def _muon(
    learning_rate, momentum, adam_learning_rate, weight_decay, dimension_numbers
) -> optax.GradientTransformationExtraArgs:
    """`optax.contrib.muon`, with its defaults."""
    _arguments.check_numbers(weight_decay=weight_decay)
    _arguments.check_numbers(below=1, momentum=momentum)
    return _two_optimizers.optimizer(
        lambda numbers_of: muon(
            learning_rate, numbers_of, beta=momentum, weight_decay=weight_decay
        ),
        _adamw_for_the_rest.choose(
            None, learning_rate, adam_learning_rate, 1e-8, nesterov=True
        ),
        dimension_numbers,
        learning_rate,
    )
