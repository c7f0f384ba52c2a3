"""CurvaDion's trigger: how much the momentum's norm changes in one step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _finite, _momentum, _paths, _trees
from curvadion_jax._protocols import Observation, Trigger
from curvadion_jax.triggers import _base

MomentumFn = Callable[[optax.OptState], Any]


def _norms(name: str, momentum: jax.Array, views) -> jax.Array:
    """Norm of every matrix of a parameter, of shape [number of matrices]."""
    view = views.get(name)
    if view is not None and view.shape == momentum.shape:
        return view.norms(momentum).reshape(-1)
    wide = momentum.astype(jnp.promote_types(jnp.float32, momentum.dtype))
    return jnp.sqrt(jnp.sum(jnp.square(wide))).reshape(1)


def _relative_change(new: jax.Array, old: jax.Array, floor) -> jax.Array:
    """|new - old| / old; 0 where old is under the floor or both are 0; NaN is inf."""
    ratio = jnp.abs(new - old) / jnp.where(old == 0, 1, old)
    ratio = jnp.where(old == 0, jnp.where(new == 0, 0, jnp.inf), ratio)
    ratio = jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
    return jnp.where((old < floor) & ~jnp.isnan(new), 0, ratio)


def _order(params: optax.Params) -> dict[str, int]:
    leaves = _paths.leaves_with_path(params)
    return {name: index for index, (name, _) in enumerate(leaves)}


def relative_momentum_change(
    threshold: optax.ScalarOrSchedule,
    *,
    floor: jax.typing.ArrayLike = 0.0,
    momentum_fn: MomentumFn | None = None,
    remember: bool = True,
) -> Trigger:
    r"""Synchronises when the momentum of any layer changes its norm fast.

    The relative momentum change (RMMC) of a layer is

    .. math::
      \mathrm{RMMC} = \bigl|\, \|m_t\| - \|m_{t-1}\| \,\bigr| \,/\, \|m_{t-1}\|

    with :math:`m_t` the momentum that this step would have if nobody communicated: for
    Dion M + G, before error feedback. Its norms are remembered, a number a matrix: what
    error feedback leaves in the state is smaller, and would read as a change that never
    ends. With constant gradients the change goes to 0, whatever the optimizer. Every
    matrix of a stack is a layer. The largest value over the layers decides;
    `adaptive_sync` then synchronises if it exceeds `threshold` on any replica. Without
    a momentum to compare with (the first step) and for NaN it is infinite, so replicas
    start together, and one whose momentum is spoilt comes to a sync, which mends it.
    (One whose gradients are not finite takes no step, and after the first asks for
    nothing.)

    The inner optimizer's momentum is found by its field: `momentum` (Dion), else
    `trace` (`optax.sgd`, `optax.trace`), else `mu` (Adam, Lion, Muon).

    RMMC measures gradient noise as much as anything: with a thousand tokens on a
    replica it lies at 0.2 to 0.6, with a million at 0.02 to 0.03. A threshold belongs
    to a batch size.

    Args:
      threshold: number, or schedule of the number of steps taken, such as one value a
        stage of training by `optax.join_schedules`. Under `optax.inject_hyperparams`
        pass it through a factory of your own.
      floor: layers of which the momentum to compare with has a smaller norm are left
        out.
      momentum_fn: function from the inner optimizer's state to a tree of momenta, for
        optimizers that keep theirs elsewhere.
      remember: False compares with the momentum in the state instead of the remembered
        norms, as the published code does; under error feedback it has a floor (0.11 at
        full rank with momentum 0.9 and constant gradients).

    Returns:
      The trigger. Its value is the largest change over the layers, its state the norms
      that it remembers, path of the parameter -> float32[matrices] (at least float32).

    Raises:
      TypeError: for a threshold that is neither a number nor a schedule, or a
        `momentum_fn` that is no function.
      ValueError: for a negative or NaN threshold, or a negative floor; when traced,
        if the inner optimizer keeps no momentum.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> trigger = relative_momentum_change(optax.linear_schedule(0.3, 0.1, 1000))
      >>> old, new = {"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([6.0, 8.0])}
      >>> norms = trigger.init(old, optax.TraceState(old), {})
      >>> for step, momentum in ((499, old), (500, new)):
      ...     seen = Observation(
      ...         params=old,
      ...         next_inner_state=lambda: optax.TraceState(momentum),
      ...         steps=jnp.array(step),
      ...     )
      ...     decision, norms = trigger.decide(seen, norms)
      >>> print(f"{decision.value:.2f} {decision.threshold:.2f} {decision.fire}")
      1.00 0.20 True

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    _arguments.check_number(threshold, "threshold")
    _arguments.check_number(floor, "floor")

    def norms(state: optax.OptState, views) -> dict[str, jax.Array]:
        momenta = _find(state, momentum_fn)
        return {name: _norms(name, m, views) for name, m in momenta.items()}

    def init(params, inner_state, views):
        if _trees.is_placeholder(params):
            return jnp.zeros([])
        if not remember or not jax.tree.leaves(params):
            return {}
        return jax.tree.map(jnp.zeros_like, norms(inner_state, views))

    def decide(observation: Observation, last: dict[str, jax.Array]):
        if not jax.tree.leaves(observation.params):
            return _base.decision(observation.steps == 0), last
        new = norms(observation.next_inner_state(), observation.views)
        old = last if remember else norms(observation.inner_state, observation.views)
        order = _order(observation.params)
        changes, layers = [jnp.zeros(1)], [-1]
        for name, norm in old.items():
            change = _relative_change(new[name], norm, floor)
            changes.append(jnp.max(change, initial=0).astype(jnp.float32).reshape(1))
            layers.append(order.get(name, -1))
        change = jnp.concatenate(changes)
        # A step that is not taken changes none; the first has nothing to compare with.
        change = jnp.where(observation.usable, change, 0)
        change = jnp.where(observation.steps == 0, jnp.inf, change)
        limit = threshold(observation.steps) if callable(threshold) else threshold
        value = jnp.max(change)
        layer = jnp.asarray(layers)[jnp.argmax(change)]
        answer = _base.decision(~(value <= limit), value, limit, layer)
        if not remember:
            return answer, last
        return answer, _finite.where(observation.usable, new, last)

    return Trigger(init, decide)


def _find(state: optax.OptState, momentum_fn: MomentumFn | None):
    if momentum_fn is None:
        return _momentum.momentum_by_name(state)
    return dict(_paths.leaves_with_path(momentum_fn(state)))
