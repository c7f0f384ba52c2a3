"""The budget is kept whatever the signal does, and the signal decides within it."""

import functools
import math
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers
from curvadion_jax.triggers import budget, evenly

STEPS = 3000
# Counts up to 3000 times a share, in float32.
ATOL = 1e-3
# The controller's sums in float32 against float64, over 3000 steps.
CONTROLLED_ATOL = 1e-3


@functools.cache
def program(build, **options):
    """Values -> (decisions, states) of every step of budget(of=these, threshold 1)."""

    def run(values):
        def look(seen: Any):
            value = values[seen.steps]
            return triggers.decision(~(value <= 1), value, 1.0)

        trigger = build(of=triggers.stateless(look), **options)

        def body(carry, steps):
            syncs, since, state = carry
            seen = triggers.Observation(steps=steps, syncs=syncs, local_steps=since)
            decision, state = trigger.decide(seen, state)
            fire = decision.fire
            carry = (syncs + fire.astype(int), jnp.where(fire, 0, since + 1), state)
            return carry, (decision, state)

        nothing = jnp.zeros([], int)
        start = (nothing, nothing, trigger.init(None, None, {}))
        return lax.scan(body, start, jnp.arange(len(values)))[1]

    return jax.jit(run)


def follow(build, values, **options):
    """(Decisions, states) of every step, of a trigger built around this signal."""
    return jax.device_get(program(build, **options)(np.float32(values)))


def signals():
    rng = np.random.default_rng(0)
    steps = np.arange(STEPS)
    noise = np.exp(rng.normal(size=STEPS))
    poisoned = np.where(steps % 7 == 3, np.nan, noise)
    poisoned = np.where(steps % 97 == 5, np.inf, poisoned)
    return {
        "zero": 0 * noise,
        "constant": np.full(STEPS, 0.2),
        "large": np.full(STEPS, 1e6),
        "growing": np.exp(steps / 300),
        "shrinking": np.exp(-steps / 300),
        "noise": 0.1 * noise,
        "spikes": np.where(steps % 50 < 3, 1e3, 1e-2),
        "stages": np.where(steps < STEPS / 2, 1e-3, 1e3) * noise,
        "nan": np.full(STEPS, np.nan),
        "infinite": np.full(STEPS, np.inf),
        "poisoned": poisoned,
    }


@pytest.mark.parametrize("name", signals())
@pytest.mark.parametrize(
    ("rate", "options"),
    [
        pytest.param(0.01, {}, id="percent"),
        pytest.param(0.01, {"ahead": 1, "behind": 0}, id="tight"),
        pytest.param(0.01, {"gain": 0.0, "cost": 2.0}, id="fixed-threshold"),
        pytest.param(0.003, {"cost": 0.3, "gain": 3.0}, id="wild"),
        pytest.param(0.6, {"cost": 0.7, "behind": 5.5}, id="often"),
        pytest.param(0.3, {"cost": 0.2}, id="more-than-all"),
    ],
)
def test_the_share_is_kept_for_any_signal(name, rate, options):
    decisions, _ = follow(budget, signals()[name], rate=rate, **options)
    share = min(1, rate / options.get("cost", 1))
    excess = np.cumsum(decisions.fire) - share * np.arange(1, STEPS + 1)
    assert excess.max() <= options.get("ahead", 3) + ATOL
    assert excess.min() >= -options.get("behind", 3) - ATOL


def one_step_later(**options):
    return triggers.delayed(budget(**options))


@pytest.mark.parametrize("name", signals())
@pytest.mark.parametrize("rate", [0.01, 0.4])
def test_one_step_later_the_share_is_kept_to_within_one_sync_more(name, rate):
    decisions, _ = follow(one_step_later, signals()[name], rate=rate)
    excess = np.cumsum(decisions.fire) - rate * np.arange(1, STEPS + 1)
    assert excess.max() <= 3 + ATOL
    assert excess.min() >= -4 - ATOL


def expected(values, share, gain, reach=1000.0, ahead=3.0, behind=3.0, warmup=0):
    """(Fired, c, i) of every step, from the equations in float64."""
    integral, syncs, counted, since, found = 0.0, 0, 0, [], []
    for step, value in enumerate(values):
        if step < warmup:
            fire = not value <= 1
            found.append((fire, 0.0, 0.0))
            continue
        excess, counted = syncs - share * counted, counted + 1
        c = gain * excess + integral
        c = min(max(c, -math.log(reach)), math.log(reach))
        wanted = not value <= math.exp(c)
        allowed = syncs + 1 <= share * counted + ahead
        required = syncs < share * counted - behind
        fire = (wanted and allowed) or required
        if math.isfinite(value):
            since.append(value)
            if required and not wanted:
                top = math.log(max(since)) if max(since) > 0 else -math.inf
                integral = min(integral, top - gain * excess)
            else:
                integral += gain**2 / 2 * share * excess
                integral += gain if wanted and not allowed else 0
            integral = min(max(integral, -math.log(reach)), math.log(reach))
        syncs += fire
        since = [] if fire else since
        found.append((fire, c, integral))
    return [np.array(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("name", ["constant", "noise", "stages", "zero", "poisoned"])
@pytest.mark.parametrize("warmup", [0, 40])
def test_against_the_equations(name, warmup):
    values = signals()[name]
    decisions, states = follow(budget, values, rate=0.02, warmup=warmup)
    fired, c, integral = expected(values, 0.02, 0.3, warmup=warmup)
    np.testing.assert_array_equal(decisions.fire, fired)
    np.testing.assert_allclose(np.log(decisions.threshold), c, atol=CONTROLLED_ATOL)
    np.testing.assert_allclose(states.integral, integral, atol=CONTROLLED_ATOL)
    np.testing.assert_array_equal(decisions.value, np.float32(values))


@pytest.mark.parametrize("scale", [0.001, 0.02, 1.0, 50.0])
def test_the_threshold_is_found_and_the_signal_decides(scale):
    """One percent of the steps, of a signal far from the initial threshold."""
    values = scale * np.exp(np.random.default_rng(1).normal(size=6000))
    decisions, _ = follow(budget, values, rate=0.01)
    late = slice(1000, None)  # after ten syncs
    fired = values[late][decisions.fire[late]]
    # Even syncs would have 5% of theirs among the largest 5%.
    assert np.mean(fired > np.quantile(values, 0.95)) > 0.8
    # The quantile that fires so often, to within what one sync moves it by.
    middle = np.mean(np.log(decisions.threshold[late]))
    assert abs(middle - np.log(np.quantile(values, 0.99))) < 0.3


def test_the_integral_does_not_wind_up():
    # 20 000 steps below any threshold, then a signal as large as the first one.
    noise = np.exp(np.random.default_rng(2).normal(size=21_000))
    values = np.where(np.arange(21_000) < 20_000, 0, noise)
    decisions, states = follow(budget, values, rate=0.05, reach=100.0)
    np.testing.assert_allclose(states.integral[19_999], -np.log(100), rtol=1e-6)
    assert decisions.threshold.min() >= 0.01 * (1 - 1e-6)
    # Six syncs of the bucket, and log(100) / 0.3 refusals later it is back.
    assert decisions.threshold[20_040:].min() > 0.5


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_the_integral_stands_still_while_the_value_is_not_finite(value):
    decisions, states = follow(budget, np.full(500, value), rate=0.05)
    np.testing.assert_array_equal(states.integral, 0)
    assert decisions.fire[:3].all()  # three ahead
    assert not decisions.fire[3:10].any()


def test_what_the_warm_up_spends_is_not_paid_back():
    # 100 steps of warm-up above the threshold on every second one; then zeros.
    values = np.where(np.arange(2000) < 100, [10.0, 0.1] * 1000, 0)
    decisions, states = follow(budget, values, rate=0.01, warmup=100)
    np.testing.assert_array_equal(decisions.fire[:100], values[:100] > 1)
    np.testing.assert_array_equal(decisions.threshold[:100], 1)
    assert (states.spending.since_step[100:] == 100).all()
    assert (states.spending.since_sync[100:] == 50).all()
    # Nothing happens for the three syncs that may be left, and then one in 100 steps.
    late = np.flatnonzero(decisions.fire[100:]) + 1
    np.testing.assert_array_equal(late, np.arange(301, 1900, 100))


def test_without_a_threshold_the_trigger_decides_within_the_bounds():
    trigger = budget(0.1, triggers.every_k(5), cost=1.0)
    syncs, fired = 0, []
    state = trigger.init(None, None, {})
    for steps in range(200):
        seen = triggers.Observation(steps=steps, syncs=syncs)
        decision, state = trigger.decide(seen, state)
        syncs += int(decision.fire)
        fired += [steps + 1] if decision.fire else []
    # Three ahead, as 5 - 4 more are made than paid for in 10 steps; then every tenth.
    assert fired[:7] == [5, 10, 15, 20, 25, 30, 40]
    assert np.diff(fired[6:]).tolist() == [10] * (len(fired) - 7)


@pytest.mark.parametrize(
    ("rate", "cost", "period"),
    [
        pytest.param(0.01, 1.0, 100, id="percent"),
        pytest.param(0.01, 0.25, 25, id="compressed"),
        pytest.param(0.1, 0.75, 7.5, id="fractional"),
        pytest.param(0.3, 1.0, 1 / 0.3, id="thirds"),
        pytest.param(1.0, 1.0, 1, id="all"),
        pytest.param(0.3, 0.2, 1, id="more-than-all"),
    ],
)
def test_evenly_spends_each_sync_as_soon_as_it_is_paid_for(rate, cost, period):
    def build(of):
        del of
        return evenly(rate, cost=cost)

    decisions, _ = follow(build, np.zeros(STEPS))
    fired = 1 + np.flatnonzero(decisions.fire)
    # Step ceil(period * j) pays for sync j; no rounding delays it.
    due = [math.ceil(period * j - 1e-6) for j in range(1, int(STEPS / period) + 1)]
    np.testing.assert_array_equal(fired, due)


def record(look):
    return triggers.stateless(lambda seen: triggers.decision(False, *look(seen)))


def test_a_trigger_is_told_what_a_sync_costs_and_the_anchor():
    params = helpers.make_params()

    def looked(synchronizer, look):
        tx: Any = cd.adaptive_sync(optax.sgd(0.1, 0.9), record(look), synchronizer)
        return tx.update(params, tx.init(params), params)[1].metrics

    def both(seen):
        return seen.sync_cost, seen.anchor["tall"][1, 2]

    found = looked(synchronizers.reconcile(), both)
    assert found.value == 2  # parameters and momenta
    assert found.threshold == params["tall"][1, 2]
    found = looked(
        synchronizers.average_gradients(),
        lambda seen: (seen.sync_cost, 1.0 if seen.anchor == () else 0.0),
    )
    assert (found.value, found.threshold) == (1, 1)


@pytest.mark.slow
def test_eight_replicas_spend_the_bytes_that_metrics_count():
    """Ten percent of the bytes, with syncs that send parameters and momenta."""
    trigger = budget(0.1, ahead=2.0, behind=1.0)
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9), trigger, synchronizers.reconcile(), helpers.AXIS
    )
    gradients = helpers.make_gradients(120, 8, scales=np.linspace(3, 0.1, 120))
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    fired = helpers.decisions(history)
    assert fired[0]
    excess = np.cumsum(fired) - 0.05 * np.arange(1, 121)  # a sync costs two
    assert excess.max() <= 2 + ATOL
    assert excess.min() >= -1 - ATOL
    read = metrics.read(history[-1][1])
    flags, weights = 120 * 4 * 7 / 4, sum(fired) * 4 * 7
    share = (read["bytes"] - flags - weights) / read["synchronous_bytes"]
    assert abs(share - 0.1) <= 2 * 2 / 120 + ATOL


def test_steps_that_are_not_taken_say_nothing_of_the_signal():
    """They have no value, and a sync that is due then does not lower the threshold."""

    def look(seen: Any):
        value = jnp.where(seen.finite, 0.5, 0.0)
        return triggers.decision(~(value <= 1), value, 1.0)

    trigger = budget(0.5, triggers.stateless(look), cost=1.0)
    state = trigger.init(None, None, {})
    for steps, usable in enumerate([True, *[False] * 9]):
        seen = triggers.Observation(steps=steps, local_steps=steps, finite=usable)
        decision, new = trigger.decide(seen, state)
        if not usable:
            assert new.integral == state.integral
        state = new
    assert decision.fire  # nothing was spent
