"""Replicas never disagree about a sync, and every program ends.

One program for each trigger takes many steps on eight devices. What its triggers look
at is generated, and different on every replica; what they ought to decide is said by a
model of the trigger in plain Python. A program that hangs meets the suite's time limit.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from decision_cases import CASES, WRAPPERS, Case, batch_of, program
from decision_models import FIRST, Seen, flushed, remembered_model
from decision_scripts import (
    LARGE,
    POISON,
    REPLICAS,
    STEPS,
    Script,
    one_by_one,
    scripts,
    usual_script,
)
from hypothesis import HealthCheck, example, given, settings

# Steps before a replica that was excluded from a sync may request one.
COOLDOWN = 10
# Parameters of up to 5: an update may miss where all meet by a rounding.
ROUNDING = 2e-6
PROPERTIES: Any = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
MEASURED = ("momentum_change", "drift", "budget-of-change")
WRAPPED = [
    f"{name}-{wrapper}" for name in ("signal", "every_k") for wrapper in WRAPPERS
]
QUICK = ("signal", "gradients", "ask_every", "all", "every_k-apply_if_finite")
# What they remember, a sync is to answer.
REMEMBERING = ("delayed", "remembered", "ask_every", "ask_every-gradients", "all")


def expected(case: Case, numbers, weights, metrics) -> list[bool]:
    """Whether each step synchronises: whether any replica requests it.

    The trigger of one whose gradients are not finite sees zeros. One that was excluded
    from the last sync is in cooldown, and one that missed it while it has no weight;
    but what a schedule says nobody requests.
    """
    models = [case.model() for _ in range(REPLICAS)]
    if case.ask_every is not None:
        models = [remembered_model(model) for model in models]
    numbers, reported = flushed(numbers), flushed(metrics.threshold)
    syncs, alone, found, cooldown = 0, 0, [], np.zeros(REPLICAS, int)
    missed = np.zeros(REPLICAS, bool)
    for step in range(STEPS):
        requests = []
        for index in range(REPLICAS):
            row, limit = numbers[:, index, step], reported[index, step]
            request = models[index](Seen(row, step, syncs, alone, limit))
            away = missed[index] and weights[index, step] == 0
            cooling = (cooldown[index] > 0 or away) and not case.trigger.scheduled
            requests.append(request and not cooling)
        asked = (case.first + step) % (case.ask_every or 1) == 0
        synced = asked and any(requests)
        found.append(synced)
        excluded = metrics.excluded.last[:, step] == step
        cooldown = COOLDOWN * excluded if synced else np.maximum(cooldown - 1, 0)
        if synced:
            missed = excluded | (metrics.absent.last[:, step] == step)
        syncs, alone = syncs + synced, 0 if synced else alone + 1
    return found


def assert_missing(case: Case, script: Script, metrics):
    """Where gradients are averaged, those are excluded that have none.

    Else nobody is: parameters and states are finite here. Absent are others, those
    without weight.
    """
    usable = np.isfinite(script.spoilt)
    without = np.zeros_like(usable) if case.synchronizer.after_local_step else ~usable
    away = ~without & (script.weights == 0)
    for name, missing in (("excluded", without), ("absent", away)):
        counted = np.diff(getattr(metrics, name).total, axis=1, prepend=0)
        np.testing.assert_array_equal(counted, missing & metrics.synced)
    in_a_row, count = metrics.excluded.in_a_row, np.zeros(REPLICAS, int)
    for step, synced in enumerate(metrics.synced[0]):
        count = np.where(without[:, step], count + 1, 0) if synced else count
        np.testing.assert_array_equal(in_a_row[:, step], count)


def assert_agreed(metrics) -> np.ndarray:
    """Counters that all replicas share are equal on all; bool[steps], the syncs."""
    for field in ("synced", "steps", "syncs", "local_steps", "votes", "empty", "sent"):
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
def test_a_sync_takes_place_where_any_replica_requests_it(name, script):
    check(name, script)


# 22 programs, 30 scripts each of 50 steps: 33,000 decisions.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30, **PROPERTIES)
@given(script=scripts())
def test_many_decisions(name, script):
    check(name, script)


def cooling_down() -> Script:
    """Replica 5 is excluded from a sync, and requests another one ever after."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.spoilt[5, 4] = np.nan
    script.numbers[FIRST, 5, 5:] = 2
    return script


@pytest.mark.parametrize("name", some(x for x in CASES if x not in REMEMBERING))
@settings(max_examples=8, **PROPERTIES)
@example(script=cooling_down())
@given(script=scripts(spoilt=POISON))
def test_gradients_that_are_not_finite(name, script):
    check(name, script)


@pytest.mark.parametrize("name", some(REMEMBERING))
@settings(max_examples=8, **PROPERTIES)
@given(script=scripts(spoilt=POISON))
def test_replicas_that_remember_agree_about_gradients_that_are_not_finite(name, script):
    _, (metrics, params, anchor) = program(name)(batch_of(script))
    synced = assert_agreed(metrics)
    assert_missing(CASES[name], script, metrics)
    if CASES[name].synchronizer.after_local_step:
        assert_together(synced, params, anchor)


def staying_away() -> Script:
    """Replica 5 misses a sync, and requests others ever after; then nobody is there."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.weights[5, 3:40] = 0
    script.numbers[FIRST, 5, 5:] = 2
    script.weights[:, 20:30] = 0
    return script


@pytest.mark.parametrize("name", some(x for x in CASES if x not in REMEMBERING))
@settings(max_examples=8, **PROPERTIES)
@example(script=staying_away())
@given(script=scripts(spoilt=POISON, absent=True))
def test_replicas_that_come_and_go(name, script):
    check(name, script)


@pytest.mark.parametrize("name", some(REMEMBERING))
@settings(max_examples=8, **PROPERTIES)
@given(script=scripts(spoilt=POISON, absent=True))
def test_replicas_that_remember_agree_about_who_is_there(name, script):
    _, (metrics, _, _) = program(name)(batch_of(script))
    assert_agreed(metrics)
    assert_missing(CASES[name], script, metrics)


@pytest.mark.parametrize("name", some(REMEMBERING))
def test_a_request_is_answered_once(name):
    """Replica 3 requests the sync that comes, and does not take the step after it."""
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
    large = (script.spoilt == LARGE).sum(1)
    taken = (script.spoilt == 0).sum(1)
    if isinstance(inner, optax.ApplyIfFiniteState):
        np.testing.assert_array_equal(inner.total_notfinite, large)
    else:
        np.testing.assert_array_equal(inner.gradient_step, taken // 3)
        np.testing.assert_array_equal(inner.mini_step, taken % 3)
