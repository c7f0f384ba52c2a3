"""When replicas synchronise.

A trigger looks at one replica's own quantities and says whether it wants a sync. It
knows no axis and sends nothing: `adaptive_sync` synchronises all replicas if one wants
to. So a trigger decides *when*, and knows neither what is sent (the synchronizer) nor
what a step does (the inner optimizer).

`every_k(10)` and `evenly(0.01)` go by the step number alone, and replicas need not
agree on each sync. `relative_momentum_change(0.1)` measures momenta, so replicas vote:
on every step, or with `at_intervals` on every k-th.
"""

import fractions
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _momentum, _paths, _trees
from curvadion_jax._interfaces import Decision, Observation, Trigger

__all__ = [
    "BudgetState",
    "Decision",
    "IntervalState",
    "Observation",
    "Trigger",
    "always",
    "at_intervals",
    "at_least_every",
    "budget",
    "decision",
    "evenly",
    "every_k",
    "never",
    "relative_momentum_change",
    "stateless",
]

# Denominators of a share of the steps: its multiples stay within int32.
_LARGEST_PERIOD = 2**15
# Of `budget`: how much the logarithm of the threshold rises at a sync, and the largest
# factor by which the threshold is moved.
_GAIN, _REACH = 0.3, 1000.0


def decision(
    fire: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike = jnp.nan,
    threshold: jax.typing.ArrayLike = jnp.nan,
    layer: jax.typing.ArrayLike = -1,
) -> Decision:
    """A `Decision` of scalar arrays of the right dtypes.

    Example:
      >>> norm = jnp.float32(3.0)
      >>> answer = decision(norm > 2, value=norm, threshold=2.0)
    """
    return Decision(
        jnp.asarray(fire, jnp.bool_),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(threshold, jnp.float32),
        jnp.asarray(layer, jnp.int32),
    )


def stateless(decide: Callable[[Observation], Decision]) -> Trigger:
    """A trigger that measures something and remembers nothing.

    Args:
      decide: observation -> `Decision`, as the trigger's `decide` without a state.

    Example:
      >>> on_even_steps = stateless(lambda seen: decision(seen.steps % 2 == 0))
      >>> bool(on_even_steps.decide(Observation(steps=4), ())[0].fire)
      True
    """
    return Trigger(lambda *_: (), lambda seen, state: (decide(seen), state))


def _measuring(trigger: Trigger, around: str) -> Callable[[Observation, Any], Any]:
    """The `decide` of a trigger for the combinator `around` it, or an error."""
    if trigger.decide is None or trigger.due is not None:
        raise ValueError(
            f"{around} is for triggers that measure something on every step, and this "
            "one is due on some steps only. Put at_intervals around all others, and "
            "use evenly or every_k alone."
        )
    return trigger.decide


def _scheduled(due: Callable[[Any, float], Any]) -> Trigger:
    return Trigger(lambda *_: (), None, due)


def always() -> Trigger:
    """Every step synchronises."""
    return _scheduled(lambda steps, cost: True)


def never() -> Trigger:
    """No step synchronises."""
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
    _arguments.check_int(k, "k", 1)
    return _scheduled(lambda steps, cost: (steps + 1) % k == 0)


def evenly(rate: float) -> Trigger:
    r"""Spends a share of the bytes of synchronous training at even intervals.

    The fixed period of a byte budget, which need not be a whole number of steps. Of n
    steps

    .. math::
      \lfloor n \, \mathrm{rate} / \mathrm{cost} \rfloor

    synchronise, with the cost of a sync in the same unit and rate / cost at most 1. It
    depends on the step number alone: after a restart with another rate what was
    spent before is neither paid back nor made up for.

    Args:
      rate: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step; 0.01 is one percent. A Python number, so static under
        `optax.inject_hyperparams`.

    Raises:
      ValueError: if the rate is not in (0, 1].

    Example:
      >>> trigger = evenly(0.8)  # a sync sends twice the gradients: 2 / 0.8 steps
      >>> [int(trigger.due(steps, 2.0)) for steps in range(12)]
      [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    """
    _arguments.check_fraction(rate, "budget")

    def due(steps, cost):
        share = _share(rate, cost)
        within, part = steps % share.denominator, share.numerator
        return (within + 1) * part // share.denominator > (
            within * part // share.denominator
        )

    return _scheduled(due)


def _share(rate: float, cost: float) -> fractions.Fraction:
    """Syncs per step that a rate pays for, at most 1."""
    if cost <= rate:
        return fractions.Fraction(1)
    share = fractions.Fraction(float(rate) / cost)
    if share < fractions.Fraction(1, _LARGEST_PERIOD):
        return fractions.Fraction(1, min(math.ceil(1 / share), 2**31 - 1))
    return share.limit_denominator(_LARGEST_PERIOD)


class BudgetState(NamedTuple):
    """State of `budget`.

    Attributes:
      of_state: what the other trigger remembers.
      integral: float32[], the lasting part of the logarithm of the threshold's factor.
        Replica-varying.
      peak: float32[], largest value since the last sync, in units of the threshold of
        the other trigger. Replica-varying.
      share: float32[], syncs per step that are paid for; NaN before the first step.
      since_step: int32[], steps taken when the share became what it is.
      since_sync: int32[], sync steps among them.
    """

    of_state: Any
    integral: jax.Array
    peak: jax.Array
    share: jax.Array
    since_step: jax.Array
    since_sync: jax.Array


def budget(
    rate: float,
    of: Trigger | None = None,
    *,
    ahead: float = 3.0,
    behind: float = 3.0,
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training when a signal says so.

    Moves the threshold of another trigger, so that its value decides when the replicas
    synchronise, and the budget how often. Whatever the values are, after n steps with s
    syncs

    .. math::
      -\mathrm{behind} \le s - n \, \mathrm{rate} / \mathrm{cost} \le \mathrm{ahead}

    with the cost of a sync in the same unit and rate / cost at most 1: at these bounds
    a request is refused, or a sync takes place without one. Where the rate or the cost
    changes, as after a restart with another budget, counting starts anew. The page on
    the algorithm has the control law.

    Args:
      rate: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step; 0.01 is one percent. The 4 bytes of each vote are not
        counted. A Python number, so static under `optax.inject_hyperparams`.
      of: trigger whose value and threshold are compared; combinators go around
        `budget`. None means ``relative_momentum_change(0.1)``.
      ahead: syncs that may be made before they are paid for, at least 1.
      behind: syncs that may be left unspent.

    Returns:
      The trigger, with the value and layer of the other one and the threshold that it
      was compared with. Its state is :class:`BudgetState`.

    Raises:
      ValueError: if the rate is not in (0, 1], `ahead` below 1, `behind` negative, or
        `of` does not measure something on every step.

    Example:
      >>> trigger = budget(0.01, relative_momentum_change(0.3))
    """
    of = relative_momentum_change(0.1) if of is None else of
    of_decide = _measuring(of, "budget")
    _arguments.check_fraction(rate, "budget")
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
        chosen, of_state = of_decide(observation, state.of_state)
        share = jnp.float32(min(rate / max(observation.sync_cost, 1e-30), 1.0))
        same = share == state.share  # False for the NaN of the first step
        since_step = jnp.where(same, state.since_step, observation.steps)
        since_sync = jnp.where(same, state.since_sync, observation.syncs)
        paid = share * (observation.steps - since_step)
        spent = observation.syncs - since_sync

        # docs/algorithm.md has this control law, with e = spent - paid, i = integral.
        bound = jnp.log(jnp.float32(_REACH))
        proportional = _GAIN * (spent - paid)
        logarithm = jnp.clip(proportional + state.integral, -bound, bound)
        threshold = jnp.exp(logarithm) * chosen.threshold
        wanted = jnp.where(
            jnp.isnan(threshold), chosen.fire, ~(chosen.value <= threshold)
        )
        allowed = spent + 1 <= paid + share + ahead
        required = spent < paid + share - behind

        ratio = chosen.value / chosen.threshold
        finite = jnp.isfinite(ratio) & observation.finite
        peak = jnp.where(observation.local_steps > 0, state.peak, 0)
        peak = jnp.maximum(peak, jnp.where(finite, ratio, 0))
        integral = state.integral + _GAIN / 2 * share * proportional
        integral += jnp.where(wanted & ~allowed, _GAIN, 0)
        # After a sync without a request, to where the peak would just not have fired.
        lowered = jnp.minimum(state.integral, jnp.log(peak) - proportional)
        integral = jnp.where(required & ~wanted, lowered, integral)
        integral = jnp.clip(integral, -bound, bound)
        integral = jnp.where(finite, integral, state.integral)

        fire = (wanted & allowed) | required
        chosen = chosen._replace(fire=fire, threshold=threshold)
        return chosen, BudgetState(
            of_state, integral, peak, share, since_step, since_sync
        )

    return Trigger(init, decide)


def at_least_every(trigger: Trigger, k: int) -> Trigger:
    """Synchronises when the trigger says so, and in any case k steps after a sync.

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
    _arguments.check_int(k, "k", 1)
    decide_of = _measuring(trigger, "at_least_every")

    def decide(observation, state):
        chosen, state = decide_of(observation, state)
        late = observation.local_steps + 1 >= k
        return chosen._replace(fire=chosen.fire | late), state

    return Trigger(trigger.init, decide)


class IntervalState(NamedTuple):
    """State of `at_intervals`. Replica-varying.

    Attributes:
      of_state: what the other trigger remembers.
      requested: bool[], whether it has requested a sync since the last one.
    """

    of_state: Any
    requested: jax.Array


def at_intervals(trigger: Trigger, k: int) -> Trigger:
    """Lets replicas vote on every k-th step only, and send nothing in between.

    A vote costs a round trip over the slow link. What a replica requests in between is
    kept, and granted at the next vote. So at most one step in k synchronises. Other
    combinators go inside.

    Args:
      trigger: one that measures something; it looks at every step.
      k: number of steps from one vote to the next, at least 1.

    Returns:
      The trigger, with the value, threshold and layer of this step. Its state is
      :class:`IntervalState`.

    Raises:
      ValueError: if k is below 1, or the trigger is due on some steps only.

    Example:
      >>> trigger = at_intervals(relative_momentum_change(0.3), 4)
      >>> [1 + step for step in range(12) if trigger.due(step, 1.0)]
      [4, 8, 12]
    """
    _arguments.check_int(k, "k", 1)
    decide_of = _measuring(trigger, "at_intervals")

    def init(params, inner_state, views):
        no = jnp.zeros([], jnp.bool_)
        return IntervalState(trigger.init(params, inner_state, views), no)

    def decide(observation, state: IntervalState):
        now, of_state = decide_of(observation, state.of_state)
        requested = (state.requested & (observation.local_steps > 0)) | now.fire
        return now._replace(fire=requested), IntervalState(of_state, requested)

    return Trigger(init, decide, lambda steps, cost: (steps + 1) % k == 0)


def relative_momentum_change(
    threshold: optax.ScalarOrSchedule,
) -> Trigger:
    r"""Synchronises when the norm of any layer's momentum changes fast.

    The relative momentum change (RMMC) of a layer is

    .. math::
      \mathrm{RMMC} = \bigl|\, \|m_t\| - \|m_{t-1}\| \,\bigr| \,/\, \|m_{t-1}\|

    with :math:`m_t` the momentum that a local step would give; for Dion M + G, before
    Dion's error feedback. Its Frobenius norms are remembered from step to step: what
    error feedback leaves in the state is smaller, and would read as a change that never
    ends. Every matrix of a stack is a layer. The largest value over the layers decides,
    and any replica's suffices. On the first step and for NaN it is infinite.

    The inner optimizer's momentum is found by its field: `momentum` (Dion, whose
    matrices alone count), else `trace` (`optax.sgd`), else `mu` (Adam, Lion, Muon).

    Args:
      threshold: number, or schedule of the number of steps taken. It belongs to a batch
        size, since RMMC is mostly gradient noise.

    Returns:
      The trigger. Its value is the largest change over the layers, its state the norms
      that it remembers, path of the parameter -> float32[matrices] (at least float32).

    Raises:
      ValueError: for a negative or NaN threshold; when traced, if the inner optimizer
        keeps no momentum.

    Example:
      >>> trigger = relative_momentum_change(0.3)
      >>> falling = relative_momentum_change(optax.linear_schedule(0.3, 0.1, 1000))

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    if not callable(threshold):
        _arguments.check_numbers(threshold=threshold)

    def norms(state: optax.OptState, views) -> dict[str, jax.Array]:
        momenta = _momentum.momentum_by_name(state)
        return {name: _norms(name, m, views) for name, m in momenta.items()}

    def init(params, inner_state, views):
        if _trees.is_placeholder(params):
            return jnp.zeros([])
        if not jax.tree.leaves(params):
            return {}
        return jax.tree.map(jnp.zeros_like, norms(inner_state, views))

    def decide(observation: Observation, last: dict[str, jax.Array]):
        if not jax.tree.leaves(observation.params):
            return decision(observation.steps == 0), last
        new = norms(observation.next_inner_state(), observation.views)
        leaves = _paths.leaves_with_path(observation.params)
        order = {name: index for index, (name, _) in enumerate(leaves)}
        changes, layers = [jnp.zeros(1)], [-1]
        for name, norm in last.items():
            change = _relative_change(new[name], norm)
            changes.append(jnp.max(change, initial=0).astype(jnp.float32).reshape(1))
            layers.append(order.get(name, -1))
        change = jnp.concatenate(changes)
        # Gradients of zeros in place of NaN say nothing; the first step has nothing
        # to compare with.
        change = jnp.where(observation.finite, change, 0)
        change = jnp.where(observation.steps == 0, jnp.inf, change)
        limit = threshold(observation.steps) if callable(threshold) else threshold
        value = jnp.max(change)
        layer = jnp.asarray(layers)[jnp.argmax(change)]
        # Spelled so that NaN synchronises.
        return decision(~(value <= limit), value, limit, layer), new

    return Trigger(init, decide)


def _norms(name: str, momentum: jax.Array, views) -> jax.Array:
    """Norm of every matrix of a parameter, of shape [number of matrices]."""
    view = views.get(name)
    if view is not None and view.shape == momentum.shape:
        return view.norms(momentum).reshape(-1)
    return jnp.sqrt(jnp.sum(jnp.square(_trees.wide(momentum)))).reshape(1)


def _relative_change(new: jax.Array, old: jax.Array) -> jax.Array:
    """|new - old| / old; 0 where both are 0; NaN is inf."""
    ratio = jnp.abs(new - old) / jnp.where(old == 0, 1, old)
    ratio = jnp.where(old == 0, jnp.where(new == 0, 0, jnp.inf), ratio)
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)
