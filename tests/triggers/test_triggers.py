"""When steps synchronise: schedules written by hand for every trigger."""

import math
from fractions import Fraction
from typing import Any

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

# Fires after steps 3, 7, 15, ...; remembers the step that it last fired after.
DOUBLING = triggers.Trigger(
    init=lambda params, inner_state, views: jnp.ones([], jnp.int32),
    decide=lambda seen, last: (
        triggers.decision(seen.steps == 2 * last),
        jnp.where(seen.steps == 2 * last, seen.steps + 1, last),
    ),
)


def run(trigger, steps):
    """Metrics of every step of one replica."""
    tx: Any = cd.adaptive_sync(optax.sgd(0.1), trigger, average_gradients())
    params = {"w": jnp.zeros(2)}

    def body(state, _):
        state = tx.update(params, state, params)[1]
        return state, state.metrics

    scan = jax.jit(lambda: lax.scan(body, tx.init(params), length=steps)[1])
    return jax.device_get(scan())


@pytest.mark.parametrize(
    ("trigger", "schedule"),
    [
        pytest.param(triggers.always(), "1111", id="always"),
        pytest.param(triggers.Trigger(lambda *_: (), None), "1111", id="neither"),
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
    metrics = run(trigger, len(schedule))
    assert "".join(str(int(x)) for x in metrics.synced) == schedule
    requested = np.array([letter == "1" for letter in schedule])
    np.testing.assert_array_equal(metrics.syncs, np.cumsum(requested))
    np.testing.assert_array_equal(metrics.steps, 1 + np.arange(len(schedule)))
    since = [i - schedule.rfind("1", 0, i + 1) for i in range(len(schedule))]
    np.testing.assert_array_equal(metrics.local_steps, since)


def test_a_decision_of_python_numbers_becomes_arrays():
    decision = triggers.Decision(jnp.array(True), 0.5, 0.25, 3)  # type: ignore
    metrics = run(triggers.stateless(lambda seen: decision), 2)
    assert metrics.value.dtype == np.float32
    assert metrics.value.tolist() == [0.5, 0.5]
    assert metrics.layer.dtype == np.int32


@pytest.mark.parametrize(
    "trigger",
    [
        *map(every_k, (1, 7, 1000)),
        *map(evenly, (0.01, np.float32(0.3), 1e-7, 1e-10, 0.9999)),
    ],
)
@pytest.mark.parametrize("cost", [0.0626, 0.987654321, 1.0, 2.0])
def test_host_and_devices_know_the_same_schedule(trigger, cost):
    """Up to the last steps that an int32 counts."""
    rng = np.random.default_rng(0)
    edges = [np.arange(300), 2**31 - 2 - np.arange(300)]
    steps = np.concatenate([*edges, rng.integers(0, 2**31 - 1, 2000)]).astype(np.int32)
    on_host = [bool(trigger.due(int(step), cost)) for step in steps]
    on_devices = jax.jit(lambda steps: trigger.due(steps, cost))(steps)
    np.testing.assert_array_equal(on_devices, on_host)


@pytest.mark.parametrize(
    ("rate", "cost"),
    [(0.01, 1.0), (0.01, 0.0626), (0.3, 1.0), (0.1, 0.75), (1 / 7, 1.0), (2e-4, 1.0)],
)
def test_evenly_is_exact_over_millions_of_steps(rate, cost):
    """The share of exact rational arithmetic, to a rounding of the share itself."""
    trigger, share = evenly(rate), Fraction(rate) / Fraction(cost)
    number = 2_000_000
    fired = trigger.due(np.arange(number), cost)
    spent = np.cumsum(fired)
    exact = [math.floor(n * share) for n in range(1, 1 + number, number // 500)]
    # Denominators are bounded, so that over n steps it may be off by n / 2^30.
    assert np.abs(spent[:: number // 500] - exact).max() <= 1 + number / 2**30
    gaps = np.diff(np.flatnonzero(fired))
    assert {*gaps} <= {math.floor(1 / share), math.ceil(1 / share)}


def test_evenly_waits_for_each_sync_until_it_is_paid_for():
    fired = [n + 1 for n in range(60) if evenly(0.1).due(n, 0.75)]
    assert fired == [math.ceil(7.5 * j) for j in range(1, 9)]
    assert all(evenly(0.3).due(n, 0.2) for n in range(9))
