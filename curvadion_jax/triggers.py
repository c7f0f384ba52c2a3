"""Triggers decide when replicas synchronise.

`every_k(10)`, DiLoCo's period H, and `evenly(0.01)` go by the step number, which all
replicas have, so nothing is sent. `relative_momentum_change(0.1)` looks at each
replica: all synchronise if the value of any is above the threshold. That is one integer
of each replica on the wire, on every step, or with `at_intervals` on every k-th.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _dtypes
from curvadion_jax.matrices import _momentum, _two_optimizers
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn

__all__ = [
    "BudgetState",
    "Clock",
    "Measured",
    "Seen",
    "Trigger",
    "always",
    "at_intervals",
    "at_least_every",
    "budget",
    "evenly",
    "every_k",
    "never",
    "relative_momentum_change",
    "requests",
]

# Where a budget's threshold of RMMC begins: the authors'.
FIRST_THRESHOLD = 0.1
# Not infinity, which `jax_debug_infs` would stop at.
_LARGEST = float(jnp.finfo(jnp.float32).max)
_UNKNOWN = -1.0  # in place of a norm: there is none to compare with
# Steps are counted in int32. A longer period does not come either.
_LONGEST = 2**31 - 1
# Largest denominator of `evenly`'s share, but for 1 / n: products stay within int32.
_LARGEST_PERIOD = 2**15


class Clock(NamedTuple):
    """A step's numbers that are the same on all replicas.

    Attributes:
      steps: int32[], or a Python number: steps taken before this one.
      syncs: the same, sync steps among them.
      since: the same, local steps since the last sync, or since the start.
      cost: a Python number: bytes of a sync over those of a float32 gradient
        all-reduce.
    """

    steps: Any = 0
    syncs: Any = 0
    since: Any = 0
    cost: float = 1.0


class Seen(NamedTuple):
    """The state of one replica, for a trigger.

    Attributes:
      gradients: this step's, after `before`; zeros where they are not finite.
      params: parameters before this step.
      inner_state: the inner optimizer's state before this step.
      after: its state after a local step, with the momentum before error feedback.
      after_is_known: whether it is that; False if a transformation around Dion passes
        no extra arguments on.
      finite: bool[], whether the gradients are finite.
      present: bool[], whether the replica has a weight. Its requests without a weight
        do not count.
      anchor: the parameters that all replicas had after the last sync; () where the
        synchronizer keeps none.
      clock: :class:`Clock`.
    """

    gradients: optax.Updates = ()
    params: optax.Params = ()
    inner_state: optax.OptState = ()
    after: optax.OptState = ()
    after_is_known: bool = True
    finite: jax.Array | bool = True
    present: jax.Array | bool = True
    anchor: optax.Params = ()
    clock: Clock = Clock()


class Measured(NamedTuple):
    """The value that a trigger measured on one replica.

    Attributes:
      value: float32[]; a sync is requested unless it is at most the threshold, so NaN
        requests one.
      layer: int32[], index of the parameter that it belongs to, in the order of the
        parameters' leaves; -1 if it belongs to none.
    """

    value: Any
    layer: Any = -1


def requests(value: jax.Array, threshold: Any) -> jax.Array:
    """Whether a measured value requests a sync: above the threshold, or NaN.

    Args:
      value: what a trigger measured, float32, of any shape.
      threshold: what it is compared with, a number or an array.

    Returns:
      bool, of the shape of `value`.

    Example:
      >>> requests(jnp.array([0.1, 0.3, jnp.nan]), 0.2).tolist()
      [False, True, True]
    """
    return ~(value <= threshold)


class Trigger(NamedTuple):
    """Decides when replicas synchronise.

    Three functions are given the clock, which is the same for all replicas. The fourth,
    `look`, sees one replica, and the clock too.

    Attributes:
      due: :class:`Clock` -> whether a decision is due on this step, bool[]. Python
        numbers give a Python bool.
      look: (:class:`Seen`, remembered) -> (:class:`Measured`, remembered), of one
        replica; called on every step, and communicates nothing. None synchronises on
        all steps that are due, without a message.
      threshold: (`Clock`, state) -> float32[], what values are compared with.
      decide: (`Clock`, whether any replica requests a sync, state) -> (whether to
        synchronise, state). On a step that is not due no replica requests one.
      init: (params, inner state) -> what `look` remembers, of one replica; called anew
        for a replica whose inner state was not finite, and begins again at a sync.
      init_state: () -> the state of `threshold` and `decide`, which is common.

    Example:
      >>> from curvadion_jax.triggers import Clock, Trigger
      >>> is_power = lambda n: n & (n - 1) == 0  # of two; of an array, too
      >>> powers = Trigger(due=lambda clock: is_power(clock.steps + 1))
      >>> [1 + step for step in range(20) if powers.due(Clock(step))]
      [1, 2, 4, 8, 16]
    """

    due: Callable[[Clock], Any] = lambda clock: True
    look: Callable[[Seen, Any], tuple[Measured, Any]] | None = None
    threshold: Callable[[Clock, Any], Any] = lambda clock, state: 0.0
    decide: Callable[[Clock, Any, Any], tuple[Any, Any]] = (
        lambda clock, requested, state: (requested, state)
    )
    init: Callable[[optax.Params, optax.OptState], Any] = lambda params, inner_state: ()
    init_state: Callable[[], Any] = lambda: ()


def always() -> Trigger:
    """Synchronises after every step.

    Returns:
      The trigger. It measures nothing, so replicas send no votes.

    Example:
      >>> [always().due(Clock(step)) for step in range(3)]
      [True, True, True]
    """
    return Trigger()


def never() -> Trigger:
    """Synchronises after no step.

    Returns:
      The trigger, with which replicas train apart. It is for tests and comparisons.

    Example:
      >>> [never().due(Clock(step)) for step in range(3)]
      [False, False, False]
    """
    return Trigger(due=lambda clock: False)


def every_k(k: int) -> Trigger:
    """Synchronises after steps k, 2k, 3k, ...

    Args:
      k: period in steps, at least 1.

    Returns:
      The trigger. It goes by the step number, so replicas send no votes.

    Raises:
      TypeError: if `k` is not a Python int.
      ValueError: if `k` is below 1.

    Example:
      >>> trigger = every_k(30)
      >>> [1 + step for step in range(60) if trigger.due(Clock(step))]
      [30, 60]
    """
    k = _period(k)
    return Trigger(due=lambda clock: (clock.steps + 1) % k == 0)


def _period(k: Any) -> int:
    _arguments.check_int(k, "k")
    return min(k, _LONGEST)


def evenly(rate: float) -> Trigger:
    r"""Spends a share of the bytes of synchronous training at even intervals.

    The period need not be a whole number of steps. Of n steps

    .. math::
      \lfloor n \, \mathrm{rate} / \mathrm{cost} \rfloor

    synchronise, with the cost of a sync in the same unit, and rate / cost at most 1 and
    rounded to a fraction. It depends on the step number alone, so after a restart with
    another rate it does not make up for what was spent before.

    Args:
      rate: share, in (0, 1], of the bytes of synchronous training, an all-reduce of
        all gradients in float32 on every step. A Python number, so static under
        `optax.inject_hyperparams`.

    Returns:
      The trigger. It goes by the step number, so replicas send no votes.

    Raises:
      TypeError: if `rate` is traced.
      ValueError: if `rate` is not in (0, 1].

    Example:
      >>> trigger = evenly(0.8)  # a sync sends twice the gradients: 2 / 0.8 steps
      >>> [int(trigger.due(Clock(steps, cost=2.0))) for steps in range(12)]
      [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    """
    _arguments.check_fraction(rate, "rate")

    def due(clock):
        share = _share(rate, clock.cost)
        # The syncs of n steps are n * share, rounded down.
        syncs, period = share.numerator, share.denominator
        step = clock.steps % period
        return (step + 1) * syncs // period > step * syncs // period

    return Trigger(due)


def _share(rate: float, cost: float) -> fractions.Fraction:
    """The syncs per step that a rate pays for, at most 1."""
    if cost <= rate:
        return fractions.Fraction(1)
    share = fractions.Fraction(float(rate) / cost)
    if share < fractions.Fraction(1, _LARGEST_PERIOD):
        return fractions.Fraction(1, min(math.ceil(1 / share), _LONGEST))
    return share.limit_denominator(_LARGEST_PERIOD)


def _look_of(trigger: Trigger, around: str) -> Callable[[Seen, Any], Any]:
    """The `look` of a trigger, for the combinator `around` it."""
    if trigger.look is None:
        raise ValueError(
            f"{around} is for triggers that measure something, and this one goes by "
            "the step number. Use evenly or every_k alone."
        )
    return trigger.look


class BudgetState(NamedTuple):
    """State of `budget`, common to all replicas.

    Attributes:
      log_factor: float32[], log of the factor of the other trigger's threshold.
      of_state: state of the other trigger.
      start: int32[2], steps and syncs when the present share came into force.
      share: float32[], syncs per step that are paid for; -1 before the first step.
    """

    log_factor: jax.Array
    of_state: Any
    start: jax.Array
    share: jax.Array


def budget(
    rate: float, of: Trigger | None = None, *, ahead: float = 1.0, behind: float = 1.0
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training, by another trigger's value.

    :func:`curvadion` has this budget, :func:`local_muon` has `evenly`.

    The value of another trigger decides when the replicas synchronise, and the rate
    how often. With p = rate / cost, the syncs per step that are paid for, the
    threshold follows

    .. math::
      \log \tau \leftarrow \log \tau + g \, (\mathrm{requested} - p)

    (g = 0.3; what `of` forces or refuses is no request): it rises where more steps
    request a sync than are paid for, and falls otherwise, so it approaches the value
    that a share p of the steps exceeds (Robbins and Monro's stochastic approximation of
    a quantile). A cap and a floor keep the number of syncs s after n steps within
    :math:`-\mathrm{behind} \le s - n p \le \mathrm{ahead}` meanwhile: a request is
    refused, or a sync takes place without one.

    Args:
      rate: as for `evenly`. The bytes of votes are not counted.
      of: a trigger that measures something. None means
        ``relative_momentum_change(0.1)``, whose 0.1 is where the threshold begins.
      ahead: syncs that may be made before they are paid for, at least 1.
      behind: syncs that may be left unspent, at least 0.

    Returns:
      The trigger, with :class:`BudgetState`. Where the rate or the cost changes, as
      after a restart, counting starts anew.

    Raises:
      TypeError: if `rate` is traced, or `ahead` or `behind` is no number.
      ValueError: if `rate`, `ahead` or `behind` is out of range, or `of` goes by the
        step number, such as `every_k`.

    References:
      Robbins and Monro, `A Stochastic Approximation Method
      <https://doi.org/10.1214/aoms/1177729586>`_, 1951

    Example:
      >>> trigger = budget(0.01, relative_momentum_change(0.3))
    """
    of = relative_momentum_change(FIRST_THRESHOLD) if of is None else of
    look = _look_of(of, "budget")
    _arguments.check_fraction(rate, "rate")
    _arguments.check_numbers(schedules=False, ahead=ahead, behind=behind)
    if not ahead >= 1:
        raise ValueError(
            f"ahead must be at least 1, got {ahead}. With less no sync could take "
            "place before it is paid for in full."
        )
    gain = 0.3  # how far one step moves the logarithm of the threshold
    largest = math.log(1000)  # within a factor of 1000 of the other trigger's

    def init_state():
        return BudgetState(
            log_factor=jnp.zeros([], jnp.float32),
            of_state=of.init_state(),
            start=jnp.zeros(2, jnp.int32),
            share=jnp.full([], -1, jnp.float32),
        )

    def threshold(clock, state: BudgetState):
        return jnp.exp(state.log_factor) * of.threshold(clock, state.of_state)

    def decide(clock, requested, state: BudgetState):
        value_requests = jnp.asarray(requested)
        requested, of_state = of.decide(clock, requested, state.of_state)
        share = jnp.float32(min(1.0, rate / clock.cost) if clock.cost else 1.0)
        counts = jnp.stack(
            [jnp.asarray(x, jnp.int32) for x in (clock.steps, clock.syncs)]
        )
        start = jnp.where(share == state.share, state.start, counts)
        steps, spent = counts - start
        paid = share * (steps + 1).astype(jnp.float32)
        spent = spent.astype(jnp.float32)
        fire = (requested & (spent + 1 <= paid + ahead)) | (spent < paid - behind)
        # Neither what `of` forces nor what it refuses says anything of the threshold.
        granted = (value_requests & requested).astype(jnp.float32)
        log_factor = state.log_factor + gain * (granted - share)
        log_factor = jnp.clip(log_factor, -largest, largest)
        return fire, BudgetState(log_factor, of_state, start, share)

    return Trigger(of.due, look, threshold, decide, of.init, init_state)


def at_least_every(trigger: Trigger, k: int) -> Trigger:
    """Synchronises when the trigger says so, and at the latest k steps after a sync.

    With `at_intervals` that is at the next vote.

    Args:
      trigger: one that measures something.
      k: largest number of steps from one sync to the next, at least 1.

    Returns:
      The trigger, with the state and the measurements of the given one.

    Raises:
      TypeError: if `k` is not a Python int.
      ValueError: if `k` is below 1, or `trigger` goes by the step number.

    Example:
      >>> trigger = at_least_every(relative_momentum_change(0.3), 50)
      >>> trigger.decide(Clock(since=49), False, ())[0]
      True
    """
    k = _period(k)
    _look_of(trigger, "at_least_every")

    def decide(clock, requested, state):
        fire, state = trigger.decide(clock, requested, state)
        return fire | (clock.since + 1 >= k), state

    return trigger._replace(decide=decide)


def at_intervals(trigger: Trigger, k: int) -> Trigger:
    """Lets replicas vote on every k-th step only, and send nothing in between.

    A vote costs a round trip over the slow link. The largest value since the last sync
    is what a vote compares, so at most one step in k synchronises. Where the trigger is
    not due itself, no vote takes place either.

    Args:
      trigger: one that measures something.
      k: number of steps from one vote to the next, at least 1.

    Returns:
      The trigger. Each replica also remembers its largest value since the last sync.

    Raises:
      TypeError: if `k` is not a Python int.
      ValueError: if `k` is below 1, or `trigger` goes by the step number.

    Example:
      >>> trigger = at_intervals(relative_momentum_change(0.3), 4)
      >>> [1 + step for step in range(12) if trigger.due(Clock(step))]
      [4, 8, 12]
    """
    k = _period(k)
    look_of = _look_of(trigger, "at_intervals")
    if k == 1:
        return trigger

    def init(params, inner_state):
        nothing = Measured(jnp.float32(-_LARGEST), jnp.int32(-1))
        return trigger.init(params, inner_state), nothing

    def look(seen, state):
        of_state, largest = state
        measured, of_state = look_of(seen, of_state)
        # NaN requests a sync, and an absent replica none, later neither.
        value = jnp.where(jnp.isnan(measured.value), _LARGEST, measured.value)
        value = jnp.where(seen.present, value, -_LARGEST)
        # A sync meets all requests before it.
        is_new = (seen.clock.since == 0) | (value > largest.value)
        waiting = Measured(
            jnp.where(is_new, value, largest.value).astype(jnp.float32),
            jnp.where(is_new, measured.layer, largest.layer).astype(jnp.int32),
        )
        return waiting, (of_state, waiting)

    due = lambda clock: trigger.due(clock) & ((clock.steps + 1) % k == 0)
    return trigger._replace(due=due, look=look, init=init)


def relative_momentum_change(
    threshold: optax.ScalarOrSchedule,
    dimension_numbers: DimensionNumbersOrFn = None,
) -> Trigger:
    r"""Synchronises when the norm of any layer's momentum changes fast.

    The relative maximum momentum change (RMMC) is, with Frobenius norms and the largest
    over the layers and replicas,

    .. math::
      \mathrm{RMMC} = \max_l \bigl|\, \|m_{l,t}\| - \|m_{l,t-1}\| \,\bigr|
      \,/\, \|m_{l,t-1}\|

    and :math:`m_t` the momentum that a local step would give. For Dion it is M + G,
    before error feedback, so the norms are remembered from step to step: the momentum
    in the state is smaller. Every matrix of a stack is a layer. On the first step and
    for NaN it is the largest float32, and for a layer whose momentum was zero and no
    longer is: the first gradient of an expert makes all replicas synchronise. Without
    any layer it is the largest float32 too, so that replicas do not train apart.

    The inner optimizer's momentum is found by its field: `momentum` (Dion, whose
    matrices alone count), else `trace` (`optax.sgd`), else `mu` (Adam, Lion, Muon).

    Args:
      threshold: number, or schedule of the number of steps taken. A good one depends on
        the batch size, since RMMC is mostly gradient noise.
      dimension_numbers: which axes make a layer, as for :func:`curvadion_jax.dion`.

    Returns:
      The trigger. It remembers the norms of all layers, float32[layers].

    Raises:
      ValueError: if the threshold is negative or NaN; at `init` of the optimizer, if
        the inner one keeps no momentum; at `update`, if it is Dion inside of a
        transformation that passes no extra arguments on, such as `optax.MultiSteps`.

    Example:
      >>> falling = relative_momentum_change(optax.linear_schedule(0.3, 0.1, 1000))

    References:
      Kumar, Jin and Quesnelle, `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """
    _arguments.check_numbers(threshold=threshold)

    def norms(params, state) -> tuple[jax.Array, list[int]]:
        """The norms of all layers, and for each the index of its parameter."""
        views = _two_optimizers.matrix_views(params, dimension_numbers)
        order = {name: index for index, name in enumerate(views)}
        found, layers = [jnp.zeros(0, jnp.float32)], []
        for name, momentum in _momentum.momentum_by_name(state, views).items():
            new = _norms(momentum, views.get(name))
            found.append(new)
            layers += [order.get(name, -1)] * len(new)
        return jnp.concatenate(found), layers

    def init(params, inner_state):
        if not jax.tree.leaves(params):
            return jnp.zeros(0, jnp.float32)
        return jnp.full_like(norms(params, inner_state)[0], _UNKNOWN)

    def look(seen: Seen, last: jax.Array):
        if not seen.after_is_known:
            raise ValueError(
                "A transformation around Dion does not pass on the extra argument "
                "momentum_only, so the momentum before error feedback is not known. "
                "Build it as an optax.GradientTransformationExtraArgs that forwards "
                "extra arguments, or put it around the whole optimizer, as "
                "optax.MultiSteps."
            )
        new, layers = norms(seen.params, seen.after)
        # Zeros for non-finite gradients say nothing; the first step has no predecessor.
        change = jnp.where(seen.finite, _relative_change(new, last), 0)
        change = jnp.where(seen.clock.steps == 0, _LARGEST, change)
        # A momentum of such zeros alone is nothing to compare the next one with.
        last = jnp.where(seen.finite | (new > 0), new, _UNKNOWN)
        if not layers:
            return Measured(jnp.float32(_LARGEST)), last
        return Measured(jnp.max(change), jnp.asarray(layers)[jnp.argmax(change)]), last

    limit = lambda clock, state: _arguments.at_step(threshold, clock.steps)
    return Trigger(look=look, threshold=limit, init=init)


def _norms(momentum: jax.Array, view: Any) -> jax.Array:
    """The norm of every matrix of a parameter, [number of matrices]."""
    axes = None
    if view is not None and view.shape == momentum.shape:
        axes = view.fan_in_axes + view.fan_out_axes
    return jnp.sqrt(
        jnp.sum(jnp.square(_dtypes.at_least_float32(momentum)), axes)
    ).reshape(-1)


def _relative_change(new: jax.Array, old: jax.Array) -> jax.Array:
    """|new - old| / old, and 0 if both are 0 or `old` is unknown.

    For NaN, and from 0 to another number, it is the largest float32.
    """
    ratio = jnp.abs(new - old) / jnp.where(old == 0, 1, old)
    ratio = jnp.where(old == 0, jnp.where(new == 0, 0, _LARGEST), ratio)
    ratio = jnp.where(ratio <= _LARGEST, ratio, _LARGEST)
    return jnp.where((old == _UNKNOWN) & jnp.isfinite(new), 0, ratio)
