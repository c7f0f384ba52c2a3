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
from curvadion_jax import synchronizers, triggers
from curvadion_jax.triggers import budget

STEPS = 3000
# Counts up to 3000 times a share, in float32.
ATOL = 1e-3
# The controller's sums in float32 against float64, over 3000 steps.
CONTROLLED_ATOL = 1e-3


@functools.cache
def program(cost=1.0, **options):
    """Values -> (decisions, states) of every step of budget(of=these, threshold 1)."""

    def run(values):
        def look(seen: Any):
            value = values[seen.steps]
            return triggers.decision(~(value <= 1), value, 1.0)

        trigger = budget(of=triggers.stateless(look), **options)

        def body(carry, steps):
            syncs, since, state = carry
            seen = triggers.Observation(
                steps=steps, syncs=syncs, local_steps=since, sync_cost=cost
            )
            decision, state = trigger.decide(seen, state)
            fire = decision.fire
            carry = (syncs + fire.astype(int), jnp.where(fire, 0, since + 1), state)
            return carry, (decision, state)

        nothing = jnp.zeros([], int)
        start = (nothing, nothing, trigger.init(None, None, {}))
        return lax.scan(body, start, jnp.arange(len(values)))[1]

    return jax.jit(run)


def follow(values, **options):
    """(Decisions, states) of every step, of a budget around this signal."""
    return jax.device_get(program(**options)(np.float32(values)))


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
        pytest.param(0.003, {"cost": 0.3}, id="cheap"),
        pytest.param(0.6, {"cost": 0.7, "behind": 5.5}, id="often"),
        pytest.param(0.3, {"cost": 0.2}, id="more-than-all"),
    ],
)
def test_the_share_is_kept_for_any_signal(name, rate, options):
    decisions, _ = follow(signals()[name], rate=rate, **options)
    share = min(1, rate / options.get("cost", 1))
    excess = np.cumsum(decisions.fire) - share * np.arange(1, STEPS + 1)
    assert excess.max() <= options.get("ahead", 3) + ATOL
    assert excess.min() >= -options.get("behind", 3) - ATOL


def expected(values, share, gain=0.3, ahead=3.0, behind=3.0):
    """(Fired, c, i) of every step, from the equations in float64."""
    integral, syncs, since, found, reach = 0.0, 0, [], [], math.log(1000)
    for step, value in enumerate(values):
        excess, paid = syncs - share * step, share * (step + 1)
        c = min(max(gain * excess + integral, -reach), reach)
        wanted = not value <= math.exp(c)
        allowed = syncs + 1 <= paid + ahead
        required = syncs < paid - behind
        fire = (wanted and allowed) or required
        if math.isfinite(value):
            since.append(value)
            if required and not wanted:
                top = math.log(max(since)) if max(since) > 0 else -math.inf
                integral = min(integral, top - gain * excess)
            else:
                integral += gain**2 / 2 * share * excess
                integral += gain if wanted and not allowed else 0
            integral = min(max(integral, -reach), reach)
        syncs += fire
        since = [] if fire else since
        found.append((fire, c, integral))
    return [np.array(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("name", ["constant", "noise", "stages", "zero", "poisoned"])
def test_against_the_equations(name):
    values = signals()[name]
    decisions, states = follow(values, rate=0.02)
    fired, c, integral = expected(values, 0.02)
    np.testing.assert_array_equal(decisions.fire, fired)
    np.testing.assert_allclose(np.log(decisions.threshold), c, atol=CONTROLLED_ATOL)
    np.testing.assert_allclose(states.integral, integral, atol=CONTROLLED_ATOL)
    np.testing.assert_array_equal(decisions.value, np.float32(values))


@pytest.mark.parametrize("scale", [0.001, 0.02, 1.0, 50.0])
def test_the_threshold_is_found_and_the_signal_decides(scale):
    """One percent of the steps, of a signal far from the initial threshold."""
    values = scale * np.exp(np.random.default_rng(1).normal(size=6000))
    decisions, _ = follow(values, rate=0.01)
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
    decisions, states = follow(values, rate=0.05)
    np.testing.assert_allclose(states.integral[19_999], -np.log(1000), rtol=1e-6)
    assert decisions.threshold.min() >= 0.001 * (1 - 1e-6)
    # Six syncs of the bucket, and log(1000) / 0.3 refusals later it is back.
    assert decisions.threshold[20_050:].min() > 0.5


def test_another_rate_starts_counting_anew():
    """As after a restart: what was spent before is not paid back."""
    signal = triggers.stateless(lambda seen: triggers.decision(False, 0.0, 1.0))
    state, syncs, fired = budget(0.5, signal).init({}, (), {}), 0, []
    for steps in range(400):
        rate = 0.5 if steps < 100 else 0.01
        seen = triggers.Observation(steps=steps, syncs=syncs)
        chosen, state = budget(rate, signal).decide(seen, state)
        syncs += int(chosen.fire)
        fired += [steps] if chosen.fire and steps >= 100 else []
    assert (int(state.since_step), int(state.since_sync)) == (100, 47)
    assert fired == []  # three may be left unspent


def test_a_trigger_without_a_threshold_decides_within_the_bounds():
    each_fifth = triggers.stateless(lambda s: triggers.decision(s.steps % 5 == 4))
    trigger, syncs, fired = budget(0.1, each_fifth), 0, []
    state = trigger.init(None, None, {})
    for steps in range(200):
        seen = triggers.Observation(steps=steps, syncs=syncs)
        decision, state = trigger.decide(seen, state)
        syncs += int(decision.fire)
        fired += [steps + 1] if decision.fire else []
    # Three ahead, as 5 - 4 more are made than paid for in 10 steps; then every tenth.
    assert fired[:7] == [5, 10, 15, 20, 25, 30, 40]
    assert np.diff(fired[6:]).tolist() == [10] * (len(fired) - 7)


def record(look):
    return triggers.stateless(lambda seen: triggers.decision(False, *look(seen)))


def test_a_trigger_is_told_what_a_sync_costs_and_the_anchor():
    params = helpers.make_params()

    def looked(synchronizer, look):
        tx: Any = cd.adaptive_sync(optax.sgd(0.1, 0.9), record(look), synchronizer)
        return tx.update(params, tx.init(params), params)[1].metrics

    both = lambda seen: (seen.sync_cost, seen.anchor["tall"][1, 2])
    found = looked(synchronizers.reconcile(), both)
    assert found.value == 1
    assert found.threshold == params["tall"][1, 2]
    found = looked(
        synchronizers.average_gradients(),
        lambda seen: (seen.sync_cost, 1.0 if seen.anchor == () else 0.0),
    )
    assert (found.value, found.threshold) == (1, 1)


def test_steps_that_are_not_finite_say_nothing_of_the_signal():
    """A sync that is required on one does not lower the threshold."""

    def look(seen: Any):
        value = jnp.where(seen.finite, 0.5, 0.0)
        return triggers.decision(~(value <= 1), value, 1.0)

    trigger = budget(0.5, triggers.stateless(look))
    state = trigger.init(None, None, {})
    for steps, finite in enumerate([True, *[False] * 9]):
        seen = triggers.Observation(steps=steps, local_steps=steps, finite=finite)
        decision, new = trigger.decide(seen, state)
        if not finite:
            assert new.integral == state.integral
        state = new
    assert decision.fire  # nothing was spent
