"""Replicas never disagree about a sync, and every program ends.

One program for each trigger takes many steps on eight devices. What its triggers look
at is generated, and different on every replica; what they ought to decide is said by a
model of the trigger in plain Python. A program that hangs meets the suite's time limit.
"""

import jax
import numpy as np
import optax
import pytest
from decisions import (
    CASES,
    LARGE,
    POISON,
    REPLICAS,
    STEPS,
    WRAPPERS,
    Case,
    Script,
    Seen,
    cooling_down,
    one_by_one,
    program,
    random_script,
    staying_away,
)

pytestmark = pytest.mark.slow  # many programs
# Steps before a replica that was excluded from a sync may request one.
COOLDOWN = 10
# Parameters of up to 5: an update may miss where all meet by a rounding.
ROUNDING = 2e-6
MEASURED = ("momentum_change", "budget-of-change")
WRAPPED = [
    f"{name}-{wrapper}" for name in ("signal", "every_k") for wrapper in WRAPPERS
]
QUICK = ("signal", "gradients", "at_intervals", "all", "every_k-apply_if_finite")


def flushed(numbers):
    """Zero in place of denormals, as XLA compares them on CPU."""
    tiny = np.abs(numbers) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), numbers)


def expected(case: Case, numbers, weights, excluded, reported) -> list[bool]:
    """Whether each step synchronises: whether any replica requests it.

    The trigger of one whose gradients are not finite sees zeros. One that was excluded
    from the last sync is in cooldown, and one without weight requests nothing; but what
    is due by the number of the step nobody requests.
    """
    models = [case.model() for _ in range(REPLICAS)]
    numbers, reported = flushed(numbers), flushed(reported)
    syncs, alone, found, cooldown = 0, 0, [], np.zeros(REPLICAS, int)
    for step in range(STEPS):
        requests = [
            model(Seen(numbers[:, i, step], step, syncs, alone, reported[i, step]))
            for i, model in enumerate(models)
        ]
        may = (cooldown == 0) & (weights[:, step] > 0)
        due = (step + 1) % case.interval == 0
        synced = due and bool(np.any(requests & (may | (case.trigger.decide is None))))
        found.append(synced)
        cooldown = np.maximum(cooldown - 1, 0)
        if synced:
            cooldown = COOLDOWN * excluded[:, step]
        syncs, alone = syncs + synced, 0 if synced else alone + 1
    return found


def each_step(counter):
    return np.diff(counter, axis=-1, prepend=0)


def assert_agreed(metrics) -> np.ndarray:
    """Counters that all replicas share are equal on all; bool[steps], the syncs."""
    for field in ("synced", "steps", "syncs", "local_steps", "votes", "sent"):
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


def assert_counted(case: Case, script: Script, metrics, synced):
    """Where gradients are averaged, those are excluded that have none.

    Else nobody is: parameters and states are finite. Absent are those without weight.
    """
    finite = np.isfinite(script.spoilt)
    after_step = case.synchronizer.after_local_step
    without = np.zeros_like(finite) if after_step else ~finite
    away = ~without & (script.weights == 0)
    for counter, events in (
        (metrics.nonfinite, ~finite),
        (metrics.excluded, without & synced),
        (metrics.absent, away & synced),
    ):
        np.testing.assert_array_equal(each_step(counter), events)


def check(name: str, script: Script):
    """Runs a script; the last state."""
    case = CASES[name]
    (_, last), (metrics, params, anchor) = program(name)(script)
    synced, finite = assert_agreed(metrics), np.isfinite(script.spoilt)
    excluded = each_step(metrics.excluded) > 0
    if name in MEASURED:
        nothing = np.full_like(metrics.value, np.nan)
        numbers = np.stack([metrics.value, nothing, metrics.threshold])
    else:
        numbers = np.where(finite, script.numbers, 0)
        assert_counted(case, script, metrics, synced)
        if case.synchronizer.after_local_step and np.all(script.weights):
            assert_together(synced, params, anchor)
    wanted = expected(case, numbers, script.weights, excluded, metrics.threshold)
    assert synced.tolist() == wanted
    return last


KINDS = {
    "usual": {},
    "not finite": {"spoilt": POISON},
    "come and go": {"spoilt": POISON, "absent": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_sync_takes_place_where_any_replica_requests_it(name, kind):
    if kind == "usual":
        for script in (one_by_one(), cooling_down(), staying_away()):
            check(name, script)
    for seed in range(6 if name in QUICK else 20):
        check(name, random_script(seed, **KINDS[kind]))


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_of_extreme_gradients(name):
    for seed in range(30):
        extreme = (*POISON, LARGE, 1e30, 3e38, -3e38, 1e-45)
        check(name, random_script(seed, extreme))


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_that_decide_for_one_replica_are_fine_inside(name):
    for seed in range(10):
        script = random_script(seed, (np.nan, LARGE, LARGE))
        state = check(name, script).inner_state
        (inner,) = [x for x in state if isinstance(x, tuple) and x]
        # In place of what is not finite the library shows them zeros.
        large = (script.spoilt == LARGE).sum(1)
        if isinstance(inner, optax.ApplyIfFiniteState):
            np.testing.assert_array_equal(inner.total_notfinite, large)
        else:
            np.testing.assert_array_equal(inner.gradient_step, (STEPS - large) // 3)
            np.testing.assert_array_equal(inner.mini_step, (STEPS - large) % 3)
