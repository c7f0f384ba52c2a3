"""Another rate, or another cost of a sync, holds from the step where it is set."""

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

BEFORE, AFTER = 200, 700
# What is in the bucket at the change, and three syncs ahead or behind of `budget`.
CREDIT, AHEAD, BEHIND = 1, 3, 3
# Counts up to 900 times a share, in float32.
ATOL = 1e-3
# From ten percent of the steps to one, or from one to ten: by the rate, by the cost of
# a sync that the trigger is told, or by that which it sees.
CHANGES = {
    "lower-rate": ({"rate": 0.1}, {"rate": 0.01}),
    "higher-rate": ({"rate": 0.01}, {"rate": 0.1}),
    "told-higher-cost": ({"rate": 0.02, "cost": 0.2}, {"rate": 0.02, "cost": 2.0}),
    "told-lower-cost": ({"rate": 0.02, "cost": 2.0}, {"rate": 0.02, "cost": 0.2}),
    "seen-higher-cost": ({"rate": 0.02, "seen": 0.2}, {"rate": 0.02, "seen": 2.0}),
    "seen-lower-cost": ({"rate": 0.02, "seen": 2.0}, {"rate": 0.02, "seen": 0.2}),
}
changes = pytest.mark.parametrize("name", CHANGES)


def share_of(rate, cost=None, seen=1.0):
    """Syncs a step."""
    return rate / (seen if cost is None else cost)


def noise():
    """A trigger whose value is one of many, and its threshold 1."""
    values = jnp.exp(jax.random.normal(jax.random.key(0), (BEFORE + AFTER,)))

    def look(seen: Any):
        value = values[seen.steps]
        return triggers.decision(~(value <= 1), value, 1.0)

    return triggers.stateless(look)


def evenly(rate, cost=None):
    return triggers.evenly(rate, cost=cost)


def budget(rate, cost=None, **options):
    return triggers.budget(rate, noise(), cost=cost, **options)


def go_on(trigger, steps, carry, seen=1.0):
    """Whether each of these steps synchronised, and the carry after them."""

    def body(carry, step):
        syncs, since, state = carry
        observation = triggers.Observation(
            steps=step, syncs=syncs, local_steps=since, sync_cost=seen
        )
        decision, state = trigger.decide(observation, state)
        fire = decision.fire
        return (syncs + fire, jnp.where(fire, 0, since + 1), state), fire

    carry, fired = jax.jit(lambda carry: lax.scan(body, carry, steps))(carry)
    return np.asarray(fired), carry


def both_runs(build, name, **options):
    """Which steps synchronised at the first rate and, from its state, at the second."""
    zero = jnp.zeros([], jnp.int32)
    carry, runs, first = (zero, zero, None), [], 0
    for settings, number in zip(CHANGES[name], (BEFORE, AFTER), strict=True):
        seen = settings.get("seen", 1.0)
        settings = {k: x for k, x in settings.items() if k != "seen"}
        trigger = build(**settings, **options)
        if first == 0:
            carry = (zero, zero, trigger.init((), (), {}))
        fired, carry = go_on(trigger, jnp.arange(first, first + number), carry, seen)
        runs.append(fired)
        first += number
    return runs


def excess(fired, share):
    """After every step, syncs made above those that are paid for."""
    return np.cumsum(fired) - share * np.arange(1, len(fired) + 1)


@changes
def test_even_syncs_are_at_the_new_distance_at_once(name):
    before, after = both_runs(evenly, name)
    shares = [share_of(**settings) for settings in CHANGES[name]]
    assert sum(before) == round(shares[0] * BEFORE)
    period = round(1 / shares[1])
    # All that was paid for is spent: step 200 made the last sync due before it.
    expected = np.arange(1, AFTER + 1) % period == 0
    np.testing.assert_array_equal(after, expected)


@changes
def test_the_budget_is_that_of_the_new_rate(name):
    before, after = both_runs(budget, name)
    shares = [share_of(**settings) for settings in CHANGES[name]]
    assert -BEHIND - ATOL <= excess(before, shares[0]).min()
    assert excess(before, shares[0]).max() <= AHEAD + ATOL
    assert -BEHIND - ATOL <= excess(after, shares[1]).min()
    assert excess(after, shares[1]).max() <= AHEAD + CREDIT + ATOL
    assert abs(sum(after) - shares[1] * AFTER) <= BEHIND + CREDIT


@pytest.mark.parametrize(
    ("first", "due"),
    [(95, [50, 150, 250]), (105, [50, 150, 250]), (99, [10, 110, 210])],
)
def test_what_was_paid_for_of_the_next_sync_is_kept(first, due):
    """Periods of 10 steps and then of 100, after half or nine tenths of the first."""
    zero, trigger = jnp.zeros([], jnp.int32), evenly(0.1)
    start = (zero, zero, trigger.init((), (), {}))
    _, carry = go_on(trigger, jnp.arange(first), start)
    fired, _ = go_on(evenly(0.01), jnp.arange(first, first + 300), carry)
    np.testing.assert_array_equal(1 + np.flatnonzero(fired), due)


def test_a_change_within_the_warm_up_counts_from_its_end():
    _, after = both_runs(budget, "lower-rate", warmup=300)
    counted = after[100:]
    assert sum(after[:100]) > 20  # the noise alone decides
    assert -BEHIND - ATOL <= excess(counted, 0.01).min()
    assert excess(counted, 0.01).max() <= AHEAD + ATOL


def optimizer(rate) -> Any:
    return cd.adaptive_sync(
        optax.sgd(0.1), triggers.evenly(rate), synchronizers.average_gradients()
    )


@pytest.mark.parametrize(
    ("rates", "expected"), [((0.1, 0.01), (20, 7)), ((0.01, 0.1), (2, 70))]
)
def test_a_restart_with_another_budget(rates, expected):
    """The state of one optimizer, given to another as after a restart."""
    params = {"w": jnp.ones(2)}
    state, syncs = optimizer(rates[0]).init(params), []
    for rate, number in zip(rates, (BEFORE, AFTER), strict=True):
        tx = optimizer(rate)

        def body(state, _, tx=tx):
            return tx.update(params, state, params)[1], ()

        scan = jax.jit(lambda state, n=number, f=body: lax.scan(f, state, length=n)[0])
        before = int(state.metrics.syncs)
        state = helpers.quick(scan, state)(state)
        syncs.append(int(state.metrics.syncs) - before)
    assert tuple(syncs) == expected
