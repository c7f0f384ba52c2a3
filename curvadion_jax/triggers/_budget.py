"""Triggers that spend a stated share of the bytes of synchronous training."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax import _arguments, _finite
from curvadion_jax._protocols import Observation, Trigger
from curvadion_jax.triggers import _base
from curvadion_jax.triggers._momentum_change import relative_momentum_change

# Four roundings to float32 stand between a rate and the steps that it pays for.
ROUNDING = 2.0**-22


class SpendingState(NamedTuple):
    """State of `evenly`: since when its rate is what it is. The same on all replicas.

    Attributes:
      share: float32[], syncs a step that the rate pays for; NaN before the first step.
      since_step: int32[], steps taken before that.
      since_sync: int32[], sync steps among them.
      credit: float32[], syncs that were paid for then and not made, in [0, 1].

    Example:
      >>> state = evenly(0.01).init({"w": jnp.ones(2)}, (), {})
      >>> int(state.since_step), float(state.credit)
      (0, 0.0)
    """

    share: jax.Array
    since_step: jax.Array
    since_sync: jax.Array
    credit: jax.Array


class BudgetState(NamedTuple):
    """State of `budget`.

    Attributes:
      of_state: what the other trigger remembers.
      integral: float32[], the lasting part of the logarithm of the threshold's factor.
        Replica-varying: its own values move it at the bounds.
      peak: float32[], largest value since the last sync, in units of the threshold of
        the other trigger. Replica-varying.
      spending: since when the rate is what it is, or since the end of the warm-up.

    Example:
      >>> from curvadion_jax import triggers
      >>> state = budget(0.01, triggers.always()).init({}, (), {})
      >>> float(state.integral), int(state.spending.since_step)
      (0.0, 0)
    """

    of_state: Any
    integral: jax.Array
    peak: jax.Array
    spending: SpendingState


def _not_spent() -> SpendingState:
    zero = jnp.zeros([], jnp.int32)
    return SpendingState(
        jnp.full([], jnp.nan, jnp.float32), zero, zero, jnp.zeros([], jnp.float32)
    )


def share_of_steps(rate, cost, observation: Observation) -> jax.Array:
    """Syncs a step that the rate pays for, at most one."""
    cost = jnp.asarray(observation.sync_cost if cost is None else cost, jnp.float32)
    cost = jnp.maximum(cost, jnp.finfo(jnp.float32).tiny)
    return jnp.minimum(jnp.asarray(rate, jnp.float32) / cost, 1)


def evenly(
    rate: jax.typing.ArrayLike, *, cost: jax.typing.ArrayLike | None = None
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training at even distances.

    The fixed period of a byte budget, which need not be a whole number of steps:
    after the step that makes n of them, s syncs and the next one are paid for when

    .. math::
      (s + 1) \, \mathrm{cost} \le \mathrm{rate} \cdot n

    Where the rate or the cost changes, as after a restart with another budget, counting
    starts anew: what was spent or saved before is neither paid back nor made up for.

    Args:
      rate: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step; 0.01 is one percent.
      cost: what a sync counts, in all-reduces of all gradients in float32. None takes
        what the synchronizer sends; with 1.0 the rate is a share of the steps.

    Returns:
      The trigger. A rate that pays for more synchronises on every step. Its state is
      :class:`SpendingState`.

    .. warning::
      It counts all syncs, those of other triggers too: after a dense start, as of
      ``after_steps(evenly(0.01), 100)``, it is silent until the share is met again.
      ``budget(rate, of, warmup=100)`` does not count the start.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if the rate is not above 0 and finite, or the cost negative.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> trigger, syncs, fired = evenly(0.8), 0, []
      >>> state = trigger.init((), (), {})
      >>> for steps in range(12):  # a sync sends twice the gradients: 2 / 0.8 steps
      ...     seen = Observation(steps=steps, syncs=syncs, sync_cost=2.0)
      ...     answer, state = trigger.decide(seen, state)
      ...     fired.append(int(answer.fire))
      ...     syncs += fired[-1]
      >>> fired
      [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    """
    _arguments.check_positive(rate, "rate")
    if cost is not None:
        _arguments.check_number(cost, "cost")

    def decide(observation: Observation, state: SpendingState):
        share = share_of_steps(rate, cost, observation)
        state = _anew_if_changed(state, share, observation)
        paid, spent = _balance(state, observation, ahead=1)
        return _base.decision(spent + 1 <= paid * (1 + ROUNDING)), state

    return Trigger(lambda *_: _not_spent(), decide, scheduled=True)


def _balance(
    state: SpendingState, observation: Observation, ahead: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Syncs paid for since the state's step, so many steps from now, and those made."""
    steps = observation.steps - state.since_step + ahead
    return state.credit + state.share * steps, observation.syncs - state.since_sync


def _anew_if_changed(
    state: SpendingState, share: jax.Array, observation: Observation
) -> SpendingState:
    """Counts from this step on where another share is paid for than before."""
    paid, spent = _balance(state, observation)
    credit = jnp.where(jnp.isnan(paid), 0, jnp.clip(paid - spent, 0, 1))
    new = _counting_from(observation, share)._replace(credit=credit)
    changed = ~(share == state.share)  # True for the NaN of the first step
    return jax.tree.map(lambda a, b: jnp.where(changed, a, b), new, state)


def _counting_from(observation: Observation, share: jax.Array) -> SpendingState:
    steps, syncs = observation.steps, observation.syncs
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return SpendingState(
        share, as_int(steps), as_int(syncs), jnp.zeros([], jnp.float32)
    )


def budget(
    rate: jax.typing.ArrayLike,
    of: Trigger | None = None,
    *,
    cost: jax.typing.ArrayLike | None = None,
    warmup: int = 0,
    ahead: jax.typing.ArrayLike = 3.0,
    behind: jax.typing.ArrayLike = 3.0,
    gain: jax.typing.ArrayLike = 0.3,
    reach: jax.typing.ArrayLike = 1000.0,
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training when a signal says so.

    Moves the threshold :math:`\tau` of another trigger, so that its value x decides
    when the replicas synchronise, and the budget how often. After n steps with s
    syncs, :math:`e = s - p n` syncs more were made than are paid for, with
    :math:`p = \mathrm{rate} / \mathrm{cost}`, at most 1. The next step synchronises if

    .. math::
      x > e^{c} \tau, \qquad c = g e + i, \qquad i \leftarrow i + \tfrac12 g^2 p \, e

    with g the `gain`. Whatever the signal does, the budget is kept: a sync that would
    be more than `ahead` syncs above what is paid for does not take place, and one takes
    place when there would be more than `behind` unspent. So after every step

    .. math::
      -\mathrm{behind} \le s - p n \le \mathrm{ahead}

    At these bounds a threshold that is far off is found quickly: i rises by g on every
    step on which the signal is refused a sync, and falls, at a sync that it did not ask
    for, to where the largest value since the last one would just not have fired. Both
    i and c stay within the logarithm of `reach`, and i stands still on steps with a
    value that is not finite (the first; NaN), so that it does not wind up.

    Syncs that are made for another reason (`any_of`) count, and may break the upper
    bound.

    The first `warmup` steps stand outside of the budget: the other trigger decides
    alone on them, at its own threshold, and counting starts after them, with c = 0.
    What they spend is not paid back later by silence, but is added to the share. Where
    the rate or the cost changes, counting starts anew.

    Args:
      rate: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step; 0.01 is one percent. The flag's 4 bytes a step are
        not counted.
      of: trigger whose value and threshold are compared. Combinators go around
        `budget` and not in here: what they add to the comparison is not seen. A
        trigger without a threshold, such as `every_k`, decides itself, within the
        bounds. None is ``relative_momentum_change(0.1)``.
      cost: what a sync counts, in all-reduces of all gradients in float32. None takes
        what the synchronizer sends; with 1.0 the rate is a share of the steps.
      warmup: number of steps at the start that are not counted.
      ahead: syncs that may be made before they are paid for, at least 1.
      behind: syncs that may be left unspent.
      gain: how much the logarithm of the threshold rises at a sync, and falls until
        the next one is paid for. 0 leaves the threshold as it is. The larger, the
        more even the syncs and the faster the threshold is found.
      reach: the largest factor by which the threshold is moved up or down.

    Returns:
      The trigger, with the value and layer of the other one and the threshold that it
      was compared with. Its state is :class:`BudgetState`.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if the rate is not above 0 and finite, `ahead` or `reach` below 1,
        or another number negative.

    Example:
      >>> from curvadion_jax import triggers
      >>> constant = triggers.stateless(lambda seen: triggers.decision(0, 0.3, 2.0))
      >>> trigger, syncs, fired = budget(0.5, constant, cost=1.0), 0, []
      >>> state = trigger.init(None, None, {})
      >>> for steps in range(100):
      ...     seen = triggers.Observation(steps=steps, syncs=syncs)
      ...     decision, state = trigger.decide(seen, state)
      ...     syncs += int(decision.fire)
      >>> 47 <= syncs <= 53
      True
    """
    of = relative_momentum_change(0.1) if of is None else of
    _base.check_trigger(of, "of")
    _arguments.check_int(warmup, "warmup", at_least=0)
    _arguments.check_positive(rate, "rate")
    numbers = {"ahead": ahead, "behind": behind, "gain": gain, "reach": reach}
    for what, number in {**numbers, "cost": 0.0 if cost is None else cost}.items():
        _arguments.check_number(number, what)
    for what in ("ahead", "reach"):
        number = numbers[what]
        if isinstance(number, int | float) and number < 1:
            raise ValueError(f"{what} must be at least 1, got {number}")

    def init(params, inner_state, views):
        return BudgetState(
            of_state=of.init(params, inner_state, views),
            integral=jnp.zeros([], jnp.float32),
            peak=jnp.zeros([], jnp.float32),
            spending=_not_spent(),
        )

    def decide(observation, state: BudgetState):
        chosen, of_state = of.decide(observation, state.of_state)
        warm = observation.steps < warmup
        share = share_of_steps(rate, cost, observation)
        spending = _finite.where(
            observation.steps <= warmup,
            _counting_from(observation, share),
            _anew_if_changed(state.spending, share, observation),
        )
        paid, spent = _balance(spending, observation)

        strength = jnp.where(warm, 0, jnp.asarray(gain, jnp.float32))
        largest = jnp.log(jnp.asarray(reach, jnp.float32))
        proportional = strength * (spent - paid)
        logarithm = jnp.clip(proportional + state.integral, -largest, largest)
        threshold = jnp.exp(logarithm) * chosen.threshold
        wanted = jnp.where(
            jnp.isnan(threshold), chosen.fire, ~(chosen.value <= threshold)
        )
        allowed = spent + 1 <= paid + share + ahead
        required = spent < paid + share - behind

        ratio = chosen.value / chosen.threshold
        finite = jnp.isfinite(ratio) & observation.usable
        since = (observation.local_steps > 0) & ~warm
        peak = jnp.where(since, state.peak, 0)
        peak = jnp.maximum(peak, jnp.where(finite, ratio, 0))
        integral = state.integral + strength / 2 * share * proportional
        integral += jnp.where(wanted & ~allowed, strength, 0)
        lowered = jnp.minimum(state.integral, jnp.log(peak) - proportional)
        lower = required & ~wanted & (strength > 0)
        integral = jnp.clip(jnp.where(lower, lowered, integral), -largest, largest)
        integral = jnp.where(finite, integral, state.integral)

        fire = jnp.where(warm, chosen.fire, (wanted & allowed) | required)
        chosen = chosen._replace(fire=fire, threshold=threshold)
        return chosen, BudgetState(of_state, integral, peak, spending)

    return Trigger(init, decide, of.scheduled)
