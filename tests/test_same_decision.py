"""Replicas never disagree about a sync, and every program ends.

One program for each trigger takes many steps on eight devices. What its triggers look
at is generated, and different on every replica; what they ought to decide is said by a
model of the trigger in plain Python. A program that hangs meets the suite's time limit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
REPLICAS, STEPS = 8, 50
# Rows of what a replica's trigger sees on a step.
FIRST, SECOND, LIMIT = range(3)
# Steps for which a replica that was left out of a sync asks for no other one.
REST = 10
# Parameters of up to 5: an update may miss where all meet by a rounding.
ROUNDING = 2e-6
PROPERTIES: Any = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
SGD = optax.sgd(0.1, 0.9)
reconcile = functools.partial(synchronizers.reconcile, momentum=False)


class Seen(NamedTuple):
    """What the model of one replica's trigger sees on a step.

    Attributes:
      numbers: float32[3], those of the rows.
      steps: steps taken before this one.
      syncs: syncs among them.
      quiet: steps since the last sync, or since the start.
      reported: what the library says that it compared with.
    """

    numbers: np.ndarray
    steps: int
    syncs: int
    quiet: int
    reported: float


Model = Callable[[Seen], bool]


def flushed(numbers):
    """Zero in place of denormals, as XLA compares them on CPU."""
    tiny = np.abs(numbers) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), numbers)


def encoded(numbers):
    """The bits of float32 as two numbers from 0 to 1, which are finite: [..., 2]."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.stack([bits >> 16, bits & 0xFFFF], -1).astype(np.float32) / 2**16


def decoded(codes):
    high, low = jnp.moveaxis((codes * 2**16).astype(jnp.uint32), -1, 0)
    return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


def signal(row=FIRST):
    def decide(seen: Any):
        numbers = decoded(seen.gradients["codes"])
        value, limit = numbers[row], numbers[LIMIT]
        return triggers.decision(~(value <= limit), value, limit, row)

    return triggers.stateless(decide)


def signal_model(row=FIRST) -> Model:
    return lambda seen: not seen.numbers[row] <= seen.numbers[LIMIT]


def any_of_model(*models: Model) -> Model:
    return lambda seen: any([model(seen) for model in models])


def at_least_every_model(model: Model, k: int) -> Model:
    return lambda seen: model(seen) | (seen.quiet + 1 >= k)


def at_most_every_model(model: Model, k: int) -> Model:
    return lambda seen: model(seen) & (seen.quiet + 1 >= k or seen.syncs == 0)


def after_steps_model(model: Model, steps: int) -> Model:
    return lambda seen: model(seen) | (seen.steps < steps)


def delayed_model(model: Model) -> Model:
    """What was said on the step before, unless a sync has answered it."""
    said = [(True, 0)]

    def wish(seen: Seen) -> bool:
        before, syncs = said.pop()
        said.append((model(seen), seen.syncs))
        return before and seen.syncs == syncs

    return wish


def remembered_model(model: Model) -> Model:
    """What was wanted since the last sync."""
    wanted = []

    def wish(seen: Seen) -> bool:
        if model(seen):
            wanted.append(seen.syncs)
        return seen.syncs in wanted

    return wish


def budget_model(rate, ahead, behind) -> Model:
    def wish(seen: Seen) -> bool:
        wanted = not seen.numbers[FIRST] <= seen.reported
        paid = rate * (seen.steps + 1)
        allowed = seen.syncs + 1 <= paid + ahead
        return (wanted and allowed) or seen.syncs < paid - behind

    return wish


def in_all():
    """All the combinators in one trigger."""
    trigger = triggers.any_of(
        triggers.remembered(signal()), triggers.delayed(signal(SECOND))
    )
    return triggers.at_least_every(triggers.at_most_every(trigger, 3), 9)


def in_all_model() -> Model:
    model = any_of_model(
        remembered_model(signal_model()), delayed_model(signal_model(SECOND))
    )
    return at_least_every_model(at_most_every_model(model, 3), 9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A trigger, what ought to come of it, and what else its program consists of.

    Attributes:
      trigger: the trigger.
      model: makes the model of one replica's.
      synchronizer: the synchronizer.
      ask_every: as of `adaptive_sync`; the model remembers as well.
      first: number of the first step.
      inner: the inner optimizer.
    """

    trigger: triggers.Trigger
    model: Callable[[], Model]
    synchronizer: synchronizers.Synchronizer = dataclasses.field(
        default_factory=reconcile
    )
    ask_every: int | None = None
    first: int = 0
    inner: optax.GradientTransformation = SGD


def only_small(gradients, params):
    """NaN in place of large numbers, which the library takes for gradients."""
    del params
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 1e3, jnp.nan, g), gradients)


def wrapped(wrapper):
    return optax.chain(optax.stateless(only_small), wrapper)


# Each decides by its replica's gradients whether to take a step.
WRAPPERS = {
    "apply_if_finite": wrapped(optax.apply_if_finite(SGD, STEPS)),
    "MultiSteps": wrapped(
        optax.MultiSteps(
            SGD, 3, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation()
    ),
}
SIGNAL = Case(signal(), signal_model)
EVERY_K = Case(triggers.every_k(7), lambda: lambda seen: seen.steps % 7 == 6)
CASES = {
    "signal": SIGNAL,
    "gradients": Case(signal(), signal_model, synchronizers.average_gradients()),
    "fragments": Case(signal(), signal_model, reconcile(fragments=2)),
    "every_k": EVERY_K,
    "any_of": Case(
        triggers.any_of(signal(), signal(SECOND), triggers.every_k(30)),
        lambda: any_of_model(
            signal_model(), signal_model(SECOND), lambda seen: seen.steps == 29
        ),
    ),
    "at_least_every": Case(
        triggers.at_least_every(signal(), 4),
        lambda: at_least_every_model(signal_model(), 4),
    ),
    "at_most_every": Case(
        triggers.at_most_every(signal(), 4),
        lambda: at_most_every_model(signal_model(), 4),
    ),
    "after_steps": Case(
        triggers.after_steps(signal(), 5), lambda: after_steps_model(signal_model(), 5)
    ),
    "delayed": Case(triggers.delayed(signal()), lambda: delayed_model(signal_model())),
    "remembered": Case(
        triggers.at_most_every(triggers.remembered(signal()), 3),
        lambda: at_most_every_model(remembered_model(signal_model()), 3),
    ),
    # Numbers of which no sum is rounded.
    "evenly": Case(
        triggers.evenly(0.375, cost=1.0),
        lambda: lambda seen: seen.syncs + 1 <= 0.375 * (seen.steps + 1),
    ),
    "budget": Case(
        triggers.budget(0.125, signal(), cost=1.0, ahead=2, behind=1),
        lambda: budget_model(0.125, 2, 1),
    ),
    "ask_every": Case(signal(), signal_model, ask_every=3, first=1),
    "ask_every-gradients": Case(
        signal(), signal_model, synchronizers.average_gradients(), ask_every=4
    ),
    "all": Case(in_all(), in_all_model),
    # What the library measures; the model is given its values.
    "momentum_change": Case(triggers.relative_momentum_change(0.4), signal_model),
    "drift": Case(triggers.drift(1.0), signal_model),
    "budget-of-change": Case(
        triggers.budget(0.125, cost=1.0, ahead=2, behind=1),
        lambda: budget_model(0.125, 2, 1),
    ),
    **{
        f"{name}-{wrapper}": dataclasses.replace(case, inner=inner)
        for name, case in {"signal": SIGNAL, "every_k": EVERY_K}.items()
        for wrapper, inner in WRAPPERS.items()
    },
}
MEASURED = ("momentum_change", "drift", "budget-of-change")
WRAPPED = [
    f"{name}-{wrapper}" for name in ("signal", "every_k") for wrapper in WRAPPERS
]
QUICK = ("signal", "gradients", "ask_every", "all", "every_k-apply_if_finite")
# What they remember, a sync is to answer.
REMEMBERING = ("delayed", "remembered", "ask_every", "ask_every-gradients", "all")


class Script(NamedTuple):
    """What happens on every step of every replica.

    Attributes:
      numbers: float32[3, replicas, steps], what the triggers see.
      spoilt: float32[replicas, steps], what is added to an element of the gradient.
      weights: float32[replicas, steps], how much each counts in a sync.
    """

    numbers: np.ndarray
    spoilt: np.ndarray
    weights: np.ndarray

    def __repr__(self) -> str:
        rows = {"first": 0, "second": 0, "limit": 1}
        pairs = [*zip(self.numbers, rows.values(), strict=True), (self.spoilt, 0)]
        pairs.append((self.weights, 1))
        unusual = [
            f"{name}[{index}, {step}] = {float(array[index, step])!r}"
            for name, (array, usual) in zip(
                [*rows, "spoilt", "weights"], pairs, strict=True
            )
            for index, step in np.argwhere(array != usual)
        ]
        return f"usual numbers but for {', '.join(unusual) or 'nothing'}"


def rounded(number):
    with np.errstate(all="ignore"):
        return float(np.float32(number).astype(jnp.bfloat16))


SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf),
    *(1 - 2**-24, 1 + 2**-23),
    *(1e-45, -1e-45, 1e-40, 2**-126, 1e-30, 1e30, 3e38, -3e38),
    *(0.1, 0.3, 1.01, rounded(0.1), rounded(0.3), rounded(1.01)),
)
NUMBERS = st.one_of(
    st.sampled_from(SPECIAL), st.floats(width=32), st.floats(width=32).map(rounded)
)


def usual_script() -> Script:
    """No signal is above the limit."""
    numbers = np.zeros((3, REPLICAS, STEPS), np.float32)
    numbers[LIMIT] = 1
    shape = REPLICAS, STEPS
    return Script(numbers, np.zeros(shape, np.float32), np.ones(shape, np.float32))


def one_by_one() -> Script:
    """Every replica is once the only one that wants a sync, by another number."""
    script = usual_script()
    numbers = (np.nan, np.inf, 1 + 2**-23, 3e38, -np.nan, 1.01, 2, 1e30)
    for index, number in enumerate(numbers):
        script.numbers[FIRST, index, 6 * index + 2] = number
    return script


PLACES = st.tuples(
    st.integers(0, 2), st.integers(0, REPLICAS - 1), st.integers(0, STEPS - 1)
)
POISON = (np.nan, np.inf, -np.inf)
LARGE = 1e6


@st.composite
def scripts(draw, spoilt=(), absent=False):
    """Mostly 0 for the signals and 1 for the limit; the rest are special numbers.

    Replicas that may be absent go and come again.
    """
    palette = np.float32([*SPECIAL, *draw(st.lists(NUMBERS, max_size=8))])
    often = draw(st.sampled_from([0.02, 0.1, 0.003, 1.0, 0.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers, spoilt_numbers, weights = usual_script()
    chosen = rng.choice(palette, numbers.shape)
    numbers = np.where(rng.random(numbers.shape) < often, chosen, numbers)
    for place, number in draw(st.lists(st.tuples(PLACES, NUMBERS), max_size=12)):
        numbers[place] = number
    if spoilt:
        share = draw(st.sampled_from([0.1, 0.5, 0.01, 0.95]))
        chosen = rng.choice(np.float32(spoilt), spoilt_numbers.shape)
        is_spoilt = rng.random(chosen.shape) < share
        spoilt_numbers = np.where(is_spoilt, chosen, spoilt_numbers)
    if absent:
        often = draw(st.sampled_from([0.05, 0.3, 0.9]))
        weights = np.logical_xor.accumulate(rng.random(weights.shape) < often, axis=1)
    return Script(numbers, spoilt_numbers, np.float32(weights))


def params_of_replicas():
    return {"codes": jnp.zeros((3, 2)), "weights": jnp.linspace(-1, 1, 4)}


@functools.cache
def program(name: str):
    """All steps in one program: gradients -> last state, (metrics, params, anchor)."""
    case = CASES[name]
    tx: Any = cd.adaptive_sync(
        case.inner, case.trigger, case.synchronizer, AXIS, ask_every=case.ask_every
    )
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, params_of_replicas(), mesh)

    def one(state, of_step):
        (gradients, weight), number = of_step
        params, opt_state = state
        updates, opt_state = tx.update(
            gradients, opt_state, params, step=number, weight=weight
        )
        params = optax.apply_updates(params, updates)
        anchor = getattr(opt_state.sync_state, "anchor", None)
        return (params, opt_state), (opt_state.metrics, params, anchor)

    def local(state, batch):
        batch = jax.tree.map(lambda x: x[0], batch)
        return lax.scan(one, state, (batch, case.first + jnp.arange(STEPS)))

    step = cd.replicas.step(local, mesh, donate=False)
    run = helpers.quick(step, state, batch_of(usual_script()))
    return lambda batch: jax.device_get(run(state, batch))


def batch_of(script: Script):
    """[replicas, steps, ...]: numbers in code, what replicas learn, and weights."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(REPLICAS, STEPS, 4)).astype(np.float32)
    weights[..., 0] += script.spoilt
    codes = encoded(np.moveaxis(script.numbers, 0, -1))
    return {"codes": codes, "weights": weights}, script.weights


def expected(case: Case, numbers, weights, metrics) -> list[bool]:
    """Whether each step synchronises: whether any replica wants it.

    The trigger of one whose gradients are not finite sees zeros. One that was left out
    of the last sync rests, and one that missed it does while it has no weight.
    """
    models = [case.model() for _ in range(REPLICAS)]
    if case.ask_every is not None:
        models = [remembered_model(model) for model in models]
    numbers, reported = flushed(numbers), flushed(metrics.threshold)
    syncs, quiet, found, rest = 0, 0, [], np.zeros(REPLICAS, int)
    missed = np.zeros(REPLICAS, bool)
    for step in range(STEPS):
        wishes = []
        for index in range(REPLICAS):
            row, limit = numbers[:, index, step], reported[index, step]
            wish = models[index](Seen(row, step, syncs, quiet, limit))
            away = missed[index] and weights[index, step] == 0
            wishes.append(wish and rest[index] == 0 and not away)
        asked = (case.first + step) % (case.ask_every or 1) == 0
        synced = asked and any(wishes)
        found.append(synced)
        left_out = metrics.left_out_at[:, step] == step
        rest = REST * left_out if synced else np.maximum(rest - 1, 0)
        if synced:
            missed = left_out | (metrics.absent_at[:, step] == step)
        syncs, quiet = syncs + synced, 0 if synced else quiet + 1
    return found


def assert_missing(case: Case, script: Script, metrics):
    """Where gradients are averaged, those are left out that have none.

    Else nobody is: parameters and states are finite here. Absent are others, those
    without weight.
    """
    usable = np.isfinite(script.spoilt)
    without = np.zeros_like(usable) if case.synchronizer.after_local_step else ~usable
    away = ~without & (script.weights == 0)
    for name, missing in (("left_out", without), ("absent", away)):
        counted = np.diff(getattr(metrics, name), axis=1, prepend=0)
        np.testing.assert_array_equal(counted, missing & metrics.synced)
    in_a_row, count = metrics.left_out_in_a_row, np.zeros(REPLICAS, int)
    for step, synced in enumerate(metrics.synced[0]):
        count = np.where(without[:, step], count + 1, 0) if synced else count
        np.testing.assert_array_equal(in_a_row[:, step], count)


def assert_agreed(metrics) -> np.ndarray:
    """Counters that all replicas share are equal on all; bool[steps], the syncs."""
    for field in ("synced", "steps", "syncs", "variant_syncs", "quiet_steps", "asked"):
        values = getattr(metrics, field)
        np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))
    synced = metrics.synced[0]
    np.testing.assert_array_equal(metrics.syncs[0], np.cumsum(synced))
    np.testing.assert_array_equal(metrics.steps[0], 1 + np.arange(STEPS))
    return synced


def assert_together(synced, params, anchor):
    """After a sync all replicas have the same parameters, and the same anchor."""
    for leaf in jax.tree.leaves(anchor):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    for leaf in jax.tree.leaves(params):
        assert np.isfinite(leaf).all()
        after = leaf[:, synced]
        np.testing.assert_allclose(
            after, np.broadcast_to(after[:1], after.shape), rtol=0, atol=ROUNDING
        )


def check(name: str, script: Script):
    """Runs a script; the last state and the metrics of all steps."""
    case = CASES[name]
    (_, last), (metrics, params, anchor) = program(name)(batch_of(script))
    synced = assert_agreed(metrics)
    numbers, usable = script.numbers, np.isfinite(script.spoilt)
    if name in MEASURED:
        nothing = np.full_like(metrics.value, np.nan)
        numbers = np.stack([metrics.value, nothing, metrics.threshold])
    else:
        numbers = np.where(usable, numbers, 0)
        assert_missing(case, script, metrics)
        everybody = np.all(script.weights)
        if case.synchronizer.after_local_step and name != "fragments" and everybody:
            assert_together(synced, params, anchor)
    assert synced.tolist() == expected(case, numbers, script.weights, metrics)
    return last, metrics


def some(names):
    return [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in names
    ]


@pytest.mark.parametrize("name", some(CASES))
@settings(max_examples=5, **PROPERTIES)
@example(script=one_by_one())
@given(script=scripts())
def test_a_sync_takes_place_where_any_replica_wants_it(name, script):
    check(name, script)


# 22 programs, 30 scripts each of 50 steps: 33,000 decisions.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30, **PROPERTIES)
@given(script=scripts())
def test_many_decisions(name, script):
    check(name, script)


def resting() -> Script:
    """Replica 5 is left out of a sync, and wants another one ever after."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.spoilt[5, 4] = np.nan
    script.numbers[FIRST, 5, 5:] = 2
    return script


@pytest.mark.parametrize("name", some(x for x in CASES if x not in REMEMBERING))
@settings(max_examples=15, **PROPERTIES)
@example(script=resting())
@given(script=scripts(spoilt=POISON))
def test_gradients_that_are_not_finite(name, script):
    check(name, script)


@pytest.mark.parametrize("name", some(REMEMBERING))
@settings(max_examples=15, **PROPERTIES)
@given(script=scripts(spoilt=POISON))
def test_replicas_that_remember_agree_about_gradients_that_are_not_finite(name, script):
    _, (metrics, params, anchor) = program(name)(batch_of(script))
    synced = assert_agreed(metrics)
    assert_missing(CASES[name], script, metrics)
    if CASES[name].synchronizer.after_local_step:
        assert_together(synced, params, anchor)


def staying_away() -> Script:
    """Replica 5 misses a sync, and wants others ever after; then nobody is there."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.weights[5, 3:40] = 0
    script.numbers[FIRST, 5, 5:] = 2
    script.weights[:, 20:30] = 0
    return script


@pytest.mark.parametrize("name", some(x for x in CASES if x not in REMEMBERING))
@settings(max_examples=15, **PROPERTIES)
@example(script=staying_away())
@given(script=scripts(spoilt=POISON, absent=True))
def test_replicas_that_come_and_go(name, script):
    check(name, script)


@pytest.mark.parametrize("name", some(REMEMBERING))
@settings(max_examples=15, **PROPERTIES)
@given(script=scripts(spoilt=POISON, absent=True))
def test_replicas_that_remember_agree_about_who_is_there(name, script):
    _, (metrics, _, _) = program(name)(batch_of(script))
    assert_agreed(metrics)
    assert_missing(CASES[name], script, metrics)


@pytest.mark.parametrize("name", some(REMEMBERING))
def test_a_wish_is_answered_once(name):
    """Replica 3 wants the sync that comes, and does not take the step after it."""
    case, script = CASES[name], usual_script()
    step = -case.first % (case.ask_every or 1)
    script.numbers[FIRST, 3, step] = 2
    script.spoilt[3, step + 1] = np.nan
    check(name, script)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
@settings(max_examples=30, **PROPERTIES)
@given(script=scripts(spoilt=(*POISON, LARGE, 1e30, 3e38, -3e38, 1e-45)))
def test_what_is_measured_of_extreme_gradients(name, script):
    check(name, script)


@pytest.mark.parametrize("name", some(WRAPPED))
@settings(max_examples=10, **PROPERTIES)
@given(script=scripts(spoilt=(np.nan, LARGE, LARGE)))
def test_wrappers_that_decide_for_one_replica_are_fine_inside(name, script):
    last, _ = check(name, script)
    (inner,) = [x for x in last.inner_state if isinstance(x, tuple) and x]
    # The library does not show them what is not finite.
    refused = (script.spoilt == LARGE).sum(1)
    taken = (script.spoilt == 0).sum(1)
    if isinstance(inner, optax.ApplyIfFiniteState):
        np.testing.assert_array_equal(inner.total_notfinite, refused)
    else:
        np.testing.assert_array_equal(inner.gradient_step, taken // 3)
        np.testing.assert_array_equal(inner.mini_step, taken % 3)
