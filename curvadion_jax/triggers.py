"""Triggers decide when replicas synchronise.

A trigger looks at one replica's own quantities and requests a sync or does not. It
knows no axis and sends nothing: `adaptive_sync` synchronises all if one requests it.

`every_k(10)` and `evenly(0.01)` depend on the step number alone, so replicas need no
vote in `replicas.step`. `relative_momentum_change(0.1)` measures momenta, so replicas
vote: on every step, or with `at_intervals` on every k-th.
"""

import fractions
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _momentum, _paths, _trees
from curvadion_jax._interfaces import Decision as Decision
from curvadion_jax._interfaces import Observation as Observation
from curvadion_jax._interfaces import Trigger as Trigger

# Largest denominator of `evenly`'s share, but for 1 / n: products stay within int32.
_LARGEST_PERIOD = 2**15
# `budget` raises the logarithm of its threshold by _GAIN at a sync, and multiplies or
# divides the threshold by _MAX_FACTOR at most.
_GAIN, _MAX_FACTOR = 0.3, 1000.0


def decision(
    fire: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike = jnp.nan,
    threshold: jax.typing.ArrayLike = jnp.nan,
    layer: jax.typing.ArrayLike = -1,
) -> Decision:
    """Makes a `Decision`, of scalar arrays of the right dtypes."""
    return Decision(
        jnp.asarray(fire, jnp.bool_),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(threshold, jnp.float32),
        jnp.asarray(layer, jnp.int32),
    )


def stateless(decide: Callable[[Observation], Decision]) -> Trigger:
    """Makes a trigger that measures something and remembers nothing.

    Args:
      decide: observation -> `Decision`, as the trigger's `decide` without a state.

    Example:
      >>> on_even_steps = stateless(lambda seen: decision(seen.steps % 2 == 0))
      >>> bool(on_even_steps.decide(Observation(steps=4), ())[0].fire)
      True
    """
    return Trigger(lambda *_: (), lambda seen, state: (decide(seen), state))


def _measuring(trigger: Trigger, around: str) -> Callable[[Observation, Any], Any]:
    """Returns the `decide` of a trigger, for the combinator `around` it."""
    if trigger.decide is None or trigger.due is not None:
        raise ValueError(
            f"{around} is for triggers that measure something on every step, and this "
            "one goes by the step number. Put at_intervals around all others, and "
            "use evenly or every_k alone."
        )
    return trigger.decide


def _scheduled(due: Callable[[Any, float], Any]) -> Trigger:
    """Makes a trigger that depends on the step number alone."""
    return Trigger(lambda *_: (), None, due)


def always() -> Trigger:
    """Synchronises after every step."""
    return _scheduled(lambda steps, cost: True)


def never() -> Trigger:
    """Synchronises after no step."""
    return _scheduled(lambda steps, cost: False)


def every_k(k: int) -> Trigger:
    """Synchronises after steps k, 2k, 3k, ...

    Args:
      k: period in steps, at least 1.

    Example:
      >>> trigger = every_k(30)
      >>> [1 + step for step in range(60) if trigger.due(step, 1.0)]
      [30, 60]
    """
    _arguments.check_int(k, "k")
    return _scheduled(lambda steps, cost: (steps + 1) % k == 0)


def evenly(rate: float) -> Trigger:
    r"""Spends a share of the bytes of synchronous training at even intervals.

    The period need not be a whole number of steps. Of n steps

    .. math::
      \lfloor n \, \mathrm{rate} / \mathrm{cost} \rfloor

    synchronise, with the cost of a sync in the same unit, and rate / cost at most 1 and
    rounded to a fraction. It depends on the step number alone, so after a restart with
    another rate it does not make up for what was spent before.

    Args:
      rate: share, in (0, 1], of the bytes of synchronous training, an all-reduce of all
        gradients in float32 on every step. A Python number, so static under
        `optax.inject_hyperparams`.

    Example:
      >>> trigger = evenly(0.8)  # a sync sends twice the gradients: 2 / 0.8 steps
      >>> [int(trigger.due(steps, 2.0)) for steps in range(12)]
      [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    """
    _arguments.check_fraction(rate, "rate")

    def due(steps, cost):
        share = _share(rate, cost)
        # The syncs of n steps are n * share, rounded down.
        syncs, period = share.numerator, share.denominator
        step = steps % period
        return (step + 1) * syncs // period > step * syncs // period

    return _scheduled(due)


def _share(rate: float, cost: float) -> fractions.Fraction:
    """The syncs per step that a rate pays for, at most 1."""
    if cost <= rate:
        return fractions.Fraction(1)
    share = fractions.Fraction(float(rate) / cost)
    if share < fractions.Fraction(1, _LARGEST_PERIOD):
        return fractions.Fraction(1, min(math.ceil(1 / share), 2**31 - 1))
    return share.limit_denominator(_LARGEST_PERIOD)


class BudgetState(NamedTuple):
    """State of `budget`.

    Attributes:
      of_state: state of the other trigger.
      integral: float32[], integral term of the control law. Replica-varying.
      peak: float32[], largest value since the last sync, in units of the threshold of
        the other trigger. Replica-varying.
      share: float32[], syncs per step that are paid for; NaN before the first step.
      since_step: int32[], steps taken when this share came into force.
      since_sync: int32[], sync steps among them.
    """

    of_state: Any
    integral: jax.Array
    peak: jax.Array
    share: jax.Array
    since_step: jax.Array
    since_sync: jax.Array


def budget(
    rate: float, of: Trigger | None = None, *, ahead: float = 3.0, behind: float = 3.0
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training when a signal says so.

    Moves the threshold of another trigger, so that its value decides when the replicas
    synchronise, and the budget how often. After n steps with s syncs, always

    .. math::
      -\mathrm{behind} \le s - n \, \mathrm{rate} / \mathrm{cost} \le \mathrm{ahead}

    with the cost of a sync in the same unit and rate / cost at most 1: at these bounds
    a request is refused, or a sync takes place without one. Where the rate or the cost
    changes, as after a restart with another budget, counting starts anew.

    Args:
      rate: as for `evenly`. The bytes of votes are not counted.
      of: trigger that measures something on every step, whose threshold is moved;
        combinators go around `budget`. None means ``relative_momentum_change(0.1)``.
      ahead: syncs that may be made before they are paid for, at least 1.
      behind: syncs that may be left unspent, at least 0.

    Returns:
      The trigger, with the value and layer of the other one and the threshold that it
      was compared with. Its state is :class:`BudgetState`.

    Example:
      >>> trigger = budget(0.01, relative_momentum_change(0.3))
    """
    of = relative_momentum_change(0.1) if of is None else of
    of_decide = _measuring(of, "budget")
    _arguments.check_fraction(rate, "rate")
    _arguments.check_numbers(behind=behind)
    if ahead < 1:
        raise ValueError(
            f"ahead must be at least 1, got {ahead}. With less no sync could take "
            "place before it is paid for in full."
        )

    def init(params, inner_state, views):
        zero = jnp.zeros([], jnp.float32)
        return BudgetState(
            of_state=of.init(params, inner_state, views),
            integral=zero,
            peak=zero,
            share=jnp.full([], jnp.nan, jnp.float32),
            since_step=jnp.zeros([], jnp.int32),
            since_sync=jnp.zeros([], jnp.int32),
        )

    def decide(observation, state: BudgetState):
        measured, of_state = of_decide(observation, state.of_state)
        cost = observation.sync_cost
        share = jnp.float32(1 if cost <= rate else rate / cost)
        same = share == state.share  # False for the NaN of the first step
        since_step = jnp.where(same, state.since_step, observation.steps)
        since_sync = jnp.where(same, state.since_sync, observation.syncs)
        paid = share * (observation.steps - since_step)
        spent = observation.syncs - since_sync

        # docs/algorithm.md has this control law, with e = spent - paid, i = integral.
        proportional = _GAIN * (spent - paid)
        log_factor = _clip_log_factor(proportional + state.integral)
        threshold = jnp.exp(log_factor) * measured.threshold
        requested = jnp.where(
            jnp.isnan(threshold), measured.fire, ~(measured.value <= threshold)
        )
        allowed = spent + 1 <= paid + share + ahead
        required = spent < paid + share - behind

        ratio = measured.value / measured.threshold
        finite = jnp.isfinite(ratio) & observation.finite
        peak = jnp.where(observation.local_steps > 0, state.peak, 0)
        peak = jnp.maximum(peak, jnp.where(finite, ratio, 0))
        integral = state.integral + _GAIN / 2 * share * proportional
        integral += jnp.where(requested & ~allowed, _GAIN, 0)
        # A sync without a request lowers the threshold to the peak.
        lowered = jnp.minimum(state.integral, jnp.log(peak) - proportional)
        integral = jnp.where(required & ~requested, lowered, integral)
        integral = jnp.where(finite, _clip_log_factor(integral), state.integral)

        fire = (requested & allowed) | required
        state = BudgetState(of_state, integral, peak, share, since_step, since_sync)
        return measured._replace(fire=fire, threshold=threshold), state

    return Trigger(init, decide)


def _clip_log_factor(x: jax.Array) -> jax.Array:
    bound = jnp.log(jnp.float32(_MAX_FACTOR))
    return jnp.clip(x, -bound, bound)


def at_least_every(trigger: Trigger, k: int) -> Trigger:
    """Synchronises when the trigger says so, and at the latest k steps after a sync.

    Args:
      trigger: one that measures something on every step.
      k: largest number of steps from one sync to the next, at least 1.

    Returns:
      The trigger, with the value, threshold and layer of the one that was given.

    Example:
      >>> trigger = at_least_every(stateless(lambda seen: decision(False)), 50)
      >>> bool(trigger.decide(Observation(local_steps=49), ())[0].fire)
      True
    """
    _arguments.check_int(k, "k")
    decide_of = _measuring(trigger, "at_least_every")

    def decide(observation, state):
        measured, state = decide_of(observation, state)
        late = observation.local_steps + 1 >= k
        return measured._replace(fire=measured.fire | late), state

    return Trigger(trigger.init, decide)


class IntervalState(NamedTuple):
    """State of `at_intervals`. Replica-varying.

    Attributes:
      of_state: state of the other trigger.
      requested: bool[], whether it has requested a sync since the last one.
    """

    of_state: Any
    requested: jax.Array


def at_intervals(trigger: Trigger, k: int) -> Trigger:
    """Lets replicas vote on every k-th step only, and send nothing in between.

    A vote costs a round trip over the slow link. A request between votes is kept until
    the next vote, so at most one step in k synchronises. Other combinators go inside.

    Args:
      trigger: one that measures something on every step.
      k: number of steps from one vote to the next, at least 1.

    Returns:
      The trigger, with the value, threshold and layer of this step. Its state is
      :class:`IntervalState`.

    Example:
      >>> trigger = at_intervals(relative_momentum_change(0.3), 4)
      >>> [1 + step for step in range(12) if trigger.due(step, 1.0)]
      [4, 8, 12]
    """
    _arguments.check_int(k, "k")
    decide_of = _measuring(trigger, "at_intervals")

    def init(params, inner_state, views):
        no = jnp.zeros([], jnp.bool_)
        return IntervalState(trigger.init(params, inner_state, views), no)

    def decide(observation, state: IntervalState):
        measured, of_state = decide_of(observation, state.of_state)
        pending = state.requested & (observation.local_steps > 0)
        requested = pending | measured.fire
        return measured._replace(fire=requested), IntervalState(of_state, requested)

    return Trigger(init, decide, lambda steps, cost: (steps + 1) % k == 0)


def relative_momentum_change(threshold: optax.ScalarOrSchedule) -> Trigger:
    r"""Synchronises when the norm of any layer's momentum changes fast.

    The relative momentum change (RMMC) of a layer is

    .. math::
      \mathrm{RMMC} = \bigl|\, \|m_t\| - \|m_{t-1}\| \,\bigr| \,/\, \|m_{t-1}\|

    with Frobenius norms and :math:`m_t` the momentum that a local step would give. For
    Dion it is M + G, before error feedback, so the norms are remembered from step to
    step: the momentum in the state is smaller. Every matrix of a stack is a layer. The
    largest RMMC over the layers decides. On the first step and for NaN it is infinite.

    The inner optimizer's momentum is found by its field: `momentum` (Dion, whose
    matrices alone count), else `trace` (`optax.sgd`), else `mu` (Adam, Lion, Muon).

    Args:
      threshold: number, or schedule of the number of steps taken. A good one depends on
        the batch size, since RMMC is mostly gradient noise.

    Returns:
      The trigger. Its value is the largest change over the layers, its state the norms
      that it remembers, path of the parameter -> float32[matrices] (at least float32).

    Example:
      >>> falling = relative_momentum_change(optax.linear_schedule(0.3, 0.1, 1000))

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    _arguments.check_numbers(threshold=threshold)

    def norms(state: optax.OptState, views) -> dict[str, jax.Array]:
        momenta = _momentum.momentum_by_name(state, views)
        return {name: _norms(name, m, views) for name, m in momenta.items()}

    def init(params, inner_state, views):
        if _trees.is_placeholder(params):
            return jnp.zeros([])
        return jax.tree.map(jnp.zeros_like, norms(inner_state, views))

    def decide(observation: Observation, last: dict[str, jax.Array]):
        new = norms(observation.next_inner_state(), observation.views)
        leaves = _paths.leaves_with_path(observation.params)
        order = {name: index for index, (name, _) in enumerate(leaves)}
        changes, layers = [jnp.float32(0)], [-1]
        for name, norm in last.items():
            change = jnp.max(_relative_change(new[name], norm))
            changes.append(change.astype(jnp.float32))
            layers.append(order.get(name, -1))
        change = jnp.stack(changes)
        # Zeros for non-finite gradients say nothing; the first step has no predecessor.
        change = jnp.where(observation.finite, change, 0)
        change = jnp.where(observation.steps == 0, jnp.inf, change)
        limit = _arguments.at_step(threshold, observation.steps)
        value = jnp.max(change)
        layer = jnp.asarray(layers)[jnp.argmax(change)]
        # Spelled so that NaN synchronises.
        return decision(~(value <= limit), value, limit, layer), new

    return Trigger(init, decide)


def _norms(name: str, momentum: jax.Array, views) -> jax.Array:
    """The norm of every matrix of a parameter, [number of matrices]."""
    view, axes = views.get(name), None
    if view is not None and view.shape == momentum.shape:
        axes = view.fan_in_axes + view.fan_out_axes
    return jnp.sqrt(jnp.sum(jnp.square(_trees.wide(momentum)), axes)).reshape(-1)


def _relative_change(new: jax.Array, old: jax.Array) -> jax.Array:
    """|new - old| / old; 0 where both are 0; NaN is inf."""
    ratio = jnp.abs(new - old) / jnp.where(old == 0, 1, old)
    ratio = jnp.where(old == 0, jnp.where(new == 0, 0, jnp.inf), ratio)
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
