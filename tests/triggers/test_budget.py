"""The budget is kept whatever the signal does, and the signal decides within it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.triggers import Clock, Measured, Trigger, budget

STEPS = 3000
# Counts up to 3000 times a share, in float32.
ATOL = 1e-3
# The controller's sums in float32 against float64, over 3000 steps.
CONTROLLED_ATOL = 1e-3
GAIN = 0.3


def signal(threshold=1.0):
    """A trigger of this threshold; what it looks at does not matter here."""
    nothing = Measured(jnp.float32(0))
    return Trigger(
        look=lambda seen, state: (nothing, state),
        threshold=lambda clock, state: jnp.float32(threshold),
    )


@functools.cache
def program(cost=1.0, **options):
    """Values -> whether each step synchronises, and what it was compared with."""

    def run(values):
        trigger = budget(**{"of": signal(), **options})

        def body(carry, of_step):
            steps, value = of_step
            syncs, since, state = carry
            clock = Clock(steps, syncs, since, cost)
            threshold = trigger.threshold(clock, state)
            fire, state = trigger.decide(clock, ~(value <= threshold), state)
            carry = syncs + fire.astype(int), jnp.where(fire, 0, since + 1), state
            return carry, (fire, threshold)

        start = jnp.array(0), jnp.array(0), trigger.init_state()
        return lax.scan(body, start, (jnp.arange(len(values)), values))[1]

    return jax.jit(run)


def follow(values, **options):
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
        pytest.param(0.003, {"cost": 0.3, "ahead": 3}, id="cheap"),
        pytest.param(0.5, {"cost": 0.7, "behind": 5.5}, id="often"),
        pytest.param(0.3, {"cost": 0.2}, id="more-than-all"),
    ],
)
def test_the_number_of_syncs_stays_within_ahead_and_behind(name, rate, options):
    fired, _ = follow(signals()[name], rate=rate, **options)
    share = min(1, rate / options.get("cost", 1))
    excess = np.cumsum(fired) - share * np.arange(1, STEPS + 1)
    assert excess.max() <= options.get("ahead", 1) + ATOL
    assert excess.min() >= -options.get("behind", 1) - ATOL


def expected(values, share, ahead=1.0, behind=1.0):
    """(Fired, log of the threshold) of every step, from the equations in float64."""
    log_factor, syncs, found, reach = 0.0, 0, [], math.log(1000)
    for step, value in enumerate(values):
        requested = not value <= math.exp(log_factor)
        paid = share * (step + 1)
        fire = (requested and syncs + 1 <= paid + ahead) or syncs < paid - behind
        found.append((fire, log_factor))
        log_factor += GAIN * (requested - share)
        log_factor = min(max(log_factor, -reach), reach)
        syncs += fire
    return [np.array(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("name", ["constant", "noise", "stages", "zero", "poisoned"])
def test_decisions_and_thresholds_are_those_of_the_equations(name):
    values = signals()[name]
    fired, threshold = follow(values, rate=0.02)
    wanted, log_factor = expected(np.float32(values), 0.02)
    np.testing.assert_array_equal(fired, wanted)
    np.testing.assert_allclose(np.log(threshold), log_factor, atol=CONTROLLED_ATOL)


@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_the_threshold_approaches_the_quantile_of_the_share(scale):
    """Of a signal far from the first threshold; most syncs are where it says so."""
    share = 0.05
    values = scale * np.exp(np.random.default_rng(1).normal(size=8000))
    fired, threshold = follow(values, rate=share)
    late = slice(4000, None)
    middle = np.mean(np.log(threshold[late]))
    assert abs(middle - np.log(np.quantile(values, 1 - share))) < 0.3
    asked = values > threshold
    assert np.mean(asked[late][fired[late]]) > 0.5
    assert abs(np.mean(asked[late]) - share) < 0.2 * share


def test_the_threshold_stays_within_a_factor_of_1000():
    """So that after a long silence it is back soon."""
    noise = np.exp(np.random.default_rng(2).normal(size=21_000))
    values = np.where(np.arange(21_000) < 20_000, 0, noise)
    _, threshold = follow(values, rate=0.05)
    np.testing.assert_allclose(threshold[19_999], 1e-3, rtol=1e-5)
    # A request raises it by 0.285 of e: log(1000) / 0.285 of them.
    assert threshold[20_050:].min() > 0.5
    _, threshold = follow(np.full(3000, np.inf), rate=0.05)
    np.testing.assert_allclose(threshold.max(), 1000, rtol=1e-5)


def test_the_threshold_follows_what_values_request_and_not_what_is_forced():
    """Forced syncs count as spent; the value still decides which others there are."""
    values = signals()["noise"]
    often = triggers.at_least_every(signal(), 40)
    (_, alone), (fired, threshold) = (
        follow(values, rate=0.02, of=of) for of in (signal(), often)
    )
    np.testing.assert_array_equal(threshold, alone)
    assert 0 < np.sum(fired & ~(values > threshold)) < np.sum(fired)


def test_requests_that_are_refused_leave_the_threshold_alone():
    """As by a cooldown: most syncs are where the value requests them all the same."""
    values = np.exp(np.random.default_rng(1).normal(size=4000))
    cooldown = lambda clock, requested, state: (requested & (clock.since >= 15), state)
    fired, threshold = follow(values, rate=0.05, of=signal()._replace(decide=cooldown))
    assert np.mean(values[fired] > threshold[fired]) > 0.9


@pytest.mark.parametrize("behind", [0.0, 1.0])
def test_without_requests_syncs_are_paid_for_and_evenly_spaced(behind):
    fired, _ = follow(np.zeros(100), rate=0.125, behind=behind)
    assert np.flatnonzero(fired).tolist() == [*range(8 if behind else 0, 100, 8)]


def test_another_rate_starts_counting_anew():
    """As after a restart: what was spent before is not paid back."""
    state, syncs, fired = budget(0.5, signal()).init_state(), 0, []
    for steps in range(400):
        trigger = budget(0.5 if steps < 100 else 0.01, signal())
        chosen, state = trigger.decide(Clock(steps, syncs), jnp.array(False), state)
        syncs += int(chosen)
        fired += [steps] if chosen and steps >= 100 else []
    assert state.start.tolist() == [100, 49]
    # One may be left unspent: the second that is paid for comes at last.
    assert fired == [100 + 100, 100 + 200]


def test_a_trigger_is_told_what_a_sync_costs_and_the_anchor():
    params = {"w": jnp.array([[1.0, 2.0]])}

    def looked(synchronizer):
        def look(seen, state):
            anchor = seen.anchor["w"][0, 1] if seen.anchor else -1.0
            return Measured(anchor), state

        threshold = lambda clock, state: jnp.float32(clock.cost)
        trigger = Trigger(look=look, threshold=threshold)
        tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, synchronizer)
        return tx.update(params, tx.init(params), params)[1].counters

    found = looked(synchronizers.reconcile())
    assert (found.value, found.threshold) == (2, 1)
    found = looked(synchronizers.average_gradients())
    assert (found.value, found.threshold) == (-1, 1)


REFUSED = {
    "percent": ({"rate": 10}, ValueError, r"got 10\. One percent is 0\.01"),
    "ahead": ({"rate": 0.1, "ahead": 0.5}, ValueError, "at least 1, got 0.5"),
    "behind": ({"rate": 0.1, "behind": -1}, ValueError, "at least 0, got -1"),
    "every_k": ({"rate": 0.1, "of": triggers.every_k(3)}, ValueError, "measure"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_budgets_that_are_none_are_refused(name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        budget(**options)


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion])
@pytest.mark.parametrize("value", [0.51, 0.7, 1])
def test_a_budget_above_one_half_warns(make, value):
    with pytest.warns(UserWarning, match=rf"budget={value} is \d+% of the bytes"):
        make(0.1, budget=value)


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion])
@pytest.mark.parametrize("value", [1e-6, 0.01, 0.5, np.float32(0.3)])
def test_smaller_budgets_do_not_warn(make, value):
    make(0.1, budget=value)


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion])
@pytest.mark.parametrize("value", [1e-9, 9e-7, np.float32(1e-12), 1e-300])
def test_a_budget_that_pays_for_no_sync_is_refused(make, value):
    with pytest.raises(ValueError, match=r"budget=.* every [\d,]+ steps.*never\(\)"):
        make(0.1, budget=value)


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion])
@pytest.mark.parametrize("value", [10, "1%", 0, -1, math.nan])
def test_optimizers_refuse_budgets_that_are_none(make, value):
    with pytest.raises(ValueError, match=r"budget is a fraction .* One percent is"):
        make(0.1, budget=value)
