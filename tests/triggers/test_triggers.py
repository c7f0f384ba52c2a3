"""When steps synchronise: schedules written by hand for every trigger."""

import math
from fractions import Fraction
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd
from curvadion_jax import triggers
from curvadion_jax.synchronizers import average_gradients
from curvadion_jax.triggers import at_intervals, at_least_every, evenly, every_k

# Requests a sync after steps 3, 7, 15, ...; remembers the last one that it requested.
DOUBLING = triggers.Trigger(
    init=lambda params, inner_state: jnp.ones([], jnp.int32),
    look=lambda seen, last: (
        triggers.Measured(seen.clock.steps == 2 * last),
        jnp.where(seen.clock.steps == 2 * last, seen.clock.steps + 1, last),
    ),
    threshold=lambda clock, state: 0.5,
)
# Decides by what it has counted itself: after every third step.
COUNTING = triggers.Trigger(
    decide=lambda clock, requested, count: (count % 3 == 2, count + 1),
    init_state=lambda: jnp.zeros([], jnp.int32),
)


def run(trigger, steps):
    """Counters of every step of one replica."""
    tx: Any = cd.adaptive_sync(optax.sgd(0.1), trigger, average_gradients())
    params = {"w": jnp.zeros(2)}

    def body(state, _):
        state = tx.update(params, state, params)[1]
        return state, state.counters

    scan = jax.jit(lambda: lax.scan(body, tx.init(params), length=steps)[1])
    return jax.device_get(scan())


@pytest.mark.parametrize(
    ("trigger", "schedule"),
    [
        pytest.param(triggers.always(), "1111", id="always"),
        pytest.param(triggers.Trigger(), "1111", id="neither"),
        pytest.param(COUNTING, "001001001", id="counting"),
        pytest.param(triggers.never(), "0000", id="never"),
        pytest.param(every_k(1), "1111", id="every-1"),
        pytest.param(every_k(3), "0010010010", id="every-3"),
        pytest.param(evenly(0.4), "0010100101", id="evenly"),
        pytest.param(DOUBLING, "00100010000000100", id="doubling"),
        # It requests 3 and 7; the bound adds 2 steps after each sync.
        pytest.param(at_least_every(DOUBLING, 2), "01101010", id="at-least-doubling"),
        # Granted on multiples of 4 and of 5.
        pytest.param(at_intervals(DOUBLING, 4), "0001000100000001", id="intervals-4"),
        pytest.param(at_intervals(DOUBLING, 5), "0000100001000010", id="intervals-5"),
    ],
)
def test_schedule(trigger, schedule):
    counters = run(trigger, len(schedule))
    synced = np.array([letter == "1" for letter in schedule])
    np.testing.assert_array_equal(counters.since == 0, synced)
    np.testing.assert_array_equal(counters.syncs, np.cumsum(synced))
    np.testing.assert_array_equal(counters.steps, 1 + np.arange(len(schedule)))
    since = [i - schedule.rfind("1", 0, i + 1) for i in range(len(schedule))]
    np.testing.assert_array_equal(counters.since, since)


def test_what_is_measured_is_shown_in_the_counters():
    trigger = triggers.Trigger(
        look=lambda seen, state: (triggers.Measured(0.5, 3), state),
        threshold=lambda clock, state: 0.25,
    )
    counters = run(trigger, 2)
    assert counters.value.dtype == counters.threshold.dtype == np.float32
    assert counters.layer.dtype == np.int32
    assert counters.value.tolist() == [0.5, 0.5]
    assert counters.threshold.tolist() == [0.25, 0.25]
    assert counters.layer.tolist() == [3, 3]


def due(trigger, steps, cost=1.0):
    return trigger.due(triggers.Clock(steps, cost=cost))


@pytest.mark.parametrize(
    "trigger",
    [
        *map(every_k, (1, 7, 1000)),
        *map(evenly, (0.01, np.float32(0.3), 1e-7, 1e-10, 0.4999)),
    ],
)
@pytest.mark.parametrize("cost", [0.0626, 0.987654321, 1.0, 2.0])
def test_host_and_devices_know_the_same_schedule(trigger, cost):
    """Up to the last steps that an int32 counts."""
    rng = np.random.default_rng(0)
    edges = [np.arange(300), 2**31 - 2 - np.arange(300)]
    steps = np.concatenate([*edges, rng.integers(0, 2**31 - 1, 2000)]).astype(np.int32)
    on_host = [bool(due(trigger, int(step), cost)) for step in steps]
    on_devices = jax.jit(lambda steps: due(trigger, steps, cost))(steps)
    np.testing.assert_array_equal(on_devices, on_host)


@pytest.mark.parametrize(
    ("rate", "cost"),
    [(0.01, 1.0), (0.01, 0.0626), (0.3, 1.0), (0.1, 0.75), (1 / 7, 1.0), (2e-4, 1.0)],
)
def test_evenly_is_exact_over_millions_of_steps(rate, cost):
    """The share of exact rational arithmetic, to a rounding of the share itself."""
    trigger, share = evenly(rate), Fraction(rate) / Fraction(cost)
    number = 2_000_000
    fired = due(trigger, np.arange(number), cost)
    spent = np.cumsum(fired)
    exact = [math.floor(n * share) for n in range(1, 1 + number, number // 500)]
    # Denominators are bounded, so that over n steps it may be off by n / 2^30.
    assert np.abs(spent[:: number // 500] - exact).max() <= 1 + number / 2**30
    gaps = np.diff(np.flatnonzero(fired))
    assert {*gaps} <= {math.floor(1 / share), math.ceil(1 / share)}


def test_evenly_waits_for_each_sync_until_it_is_paid_for():
    fired = [n + 1 for n in range(60) if due(evenly(0.1), n, 0.75)]
    assert fired == [math.ceil(7.5 * j) for j in range(1, 9)]
    assert all(due(evenly(0.3), n, 0.2) for n in range(9))


@pytest.mark.parametrize("k", [0, -1, 2.0, "3", jnp.array(3), None])
@pytest.mark.parametrize(
    "make",
    [
        every_k,
        lambda k: at_least_every(triggers.relative_momentum_change(0.1), k),
        lambda k: at_intervals(triggers.relative_momentum_change(0.1), k),
    ],
    ids=["every_k", "at_least_every", "at_intervals"],
)
def test_periods_are_whole_numbers(make, k):
    with pytest.raises((TypeError, ValueError), match="k must be"):
        make(k)


@pytest.mark.parametrize(
    "trigger",
    [
        every_k(2**31),
        every_k(2**40),
        evenly(1e-12),
        at_intervals(triggers.relative_momentum_change(0.1), 2**40),
    ],
)
def test_periods_that_int32_does_not_hold_never_come(trigger):
    assert not jax.jit(lambda steps: due(trigger, steps))(jnp.int32(5))
    longest = at_least_every(triggers.relative_momentum_change(0.1), 2**40)
    clock = triggers.Clock(since=jnp.int32(5))
    assert not jax.jit(lambda: longest.decide(clock, jnp.array(False), ())[0])()


# What a trigger sees of replica 1 on the second step, whose gradient is (30, 40) there,
# clipped to (3, 4) before SGD of rate 1 and momentum 1/2. The first one was (0, 1).
SEEN = {
    "gradients": (lambda seen: seen.gradients["w"][1], 4.0),
    "params": (lambda seen: seen.params["w"][1], 9.0),
    "inner_state": (lambda seen: seen.inner_state[0].trace["w"][1], 1.0),
    "after": (lambda seen: seen.after[0].trace["w"][1], 4.5),
    "anchor": (lambda seen: seen.anchor["w"][1], 10.0),
    "finite": (lambda seen: seen.finite, 1.0),
    "steps": (lambda seen: seen.clock.steps, 1.0),
    "since": (lambda seen: seen.clock.since, 1.0),
    "syncs": (lambda seen: seen.clock.syncs, 0.0),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_a_trigger_sees_of_a_replica(name):
    look, expected = SEEN[name]
    trigger = triggers.Trigger(
        look=lambda seen, state: (triggers.Measured(look(seen) * 1.0), state),
        threshold=lambda clock, state: 1e9,
    )
    mesh = cd.replicas.simulated(2)
    tx = cd.adaptive_sync(
        optax.sgd(1.0, 0.5),
        trigger,
        cd.synchronizers.reconcile(),
        mesh,
        before=optax.clip_by_global_norm(5.0),
    )
    trees = [{"w": np.float32([[0, 2], second])} for second in ([0, 1], [30, 40])]
    params = {"w": np.float32([5, 10])}
    _, (_, state) = helpers.run(tx, mesh, params, trees)
    np.testing.assert_allclose(state.counters.value[1], expected, rtol=1e-6)


def test_a_trigger_sees_zeros_for_a_gradient_that_is_not_finite():
    trigger = triggers.Trigger(
        look=lambda seen, state: (
            triggers.Measured(seen.gradients["w"][0] + 2.0 * seen.finite),
            state,
        ),
        threshold=lambda clock, state: 1e9,
    )
    mesh = cd.replicas.simulated(2)
    tx = cd.adaptive_sync(optax.sgd(1.0), trigger, average_gradients(), mesh)
    trees = [{"w": np.float32([[np.nan, 1], [5, 1]])}]
    ((_, state),) = helpers.run(tx, mesh, {"w": np.zeros(2, np.float32)}, trees)
    assert state.counters.value.tolist() == [0, 7]
