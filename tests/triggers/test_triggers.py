"""When steps synchronise: schedules written by hand for every trigger."""

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
from curvadion_jax.triggers import (
    after_steps,
    always,
    any_of,
    at_least_every,
    at_most_every,
    delayed,
    every_k,
    never,
    remembered,
)

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
    tx: Any = cd.adaptive_sync(
        optax.sgd(0.1), trigger, synchronizers.average_gradients()
    )
    params = {"w": jnp.zeros(2)}

    def body(state, _):
        state = tx.update(params, state, params)[1]
        return state, state.metrics

    scan = jax.jit(lambda: lax.scan(body, tx.init(params), length=steps)[1])
    return jax.device_get(scan())


def as_text(synced):
    return "".join(str(int(x)) for x in synced)


@pytest.mark.parametrize(
    ("trigger", "schedule"),
    [
        pytest.param(always(), "1111", id="always"),
        pytest.param(never(), "0000", id="never"),
        pytest.param(every_k(1), "1111", id="every-1"),
        pytest.param(every_k(3), "0010010010", id="every-3"),
        # 3 steps after a sync or the start, and after steps 4, 8, 12.
        pytest.param(at_least_every(never(), 3), "001001001", id="at-least-never"),
        pytest.param(at_least_every(every_k(4), 3), "001100110011", id="at-least"),
        # The first may come at any time; every_k(2) requests 2, 4, 6, 8, 10.
        pytest.param(at_most_every(always(), 3), "1001001", id="at-most-always"),
        pytest.param(at_most_every(every_k(2), 3), "0100010001", id="at-most"),
        pytest.param(at_most_every(always(), 1), "1111", id="at-most-1"),
        pytest.param(after_steps(every_k(3), 2), "111001001", id="after-2"),
        pytest.param(after_steps(never(), 0), "000", id="after-0"),
        # Multiples of 2 or 3.
        pytest.param(any_of(every_k(2), every_k(3)), "011101011101", id="any-of"),
        pytest.param(any_of(never()), "000", id="any-of-one"),
        # Due from 2 steps after the last sync on, allowed from 3 on.
        pytest.param(
            at_most_every(at_least_every(never(), 2), 3), "01001001", id="nested"
        ),
        pytest.param(DOUBLING, "00100010000000100", id="doubling"),
        # The doubling trigger is asked on every step, whoever decides.
        pytest.param(any_of(never(), DOUBLING), "00100010", id="any-of-doubling"),
        pytest.param(after_steps(DOUBLING, 4), "11110010", id="after-doubling"),
        # It requests 3 and 7; the bound adds 2 steps after each sync.
        pytest.param(at_least_every(DOUBLING, 2), "01101010", id="at-least-doubling"),
        pytest.param(at_most_every(DOUBLING, 5), "00100000", id="at-most-doubling"),
        # The first step, and one step after those that the trigger requests.
        pytest.param(delayed(never()), "1000", id="delayed-never"),
        pytest.param(delayed(every_k(3)), "1001001001", id="delayed-every-3"),
        pytest.param(delayed(DOUBLING), "1001000100000001", id="delayed-doubling"),
        # What it requests on a sync step is dropped.
        pytest.param(delayed(always()), "1010101", id="delayed-always"),
        pytest.param(
            at_least_every(delayed(never()), 3), "1001001001", id="at-least-delayed"
        ),
        pytest.param(
            delayed(at_least_every(never(), 3)), "1000100010001", id="delayed-at-least"
        ),
        pytest.param(remembered(every_k(3)), "001001001", id="remembered"),
        # Requested after 2, 4, 6, 8, 10: at 4 for 5, not at 5 for itself, at 6 for 8.
        pytest.param(
            at_most_every(remembered(every_k(2)), 3), "0100100100", id="most-remembered"
        ),
    ],
)
def test_schedule(trigger, schedule):
    metrics = run(trigger, len(schedule))
    assert as_text(metrics.synced) == schedule
    requested = np.array([letter == "1" for letter in schedule])
    np.testing.assert_array_equal(metrics.syncs, np.cumsum(requested))
    np.testing.assert_array_equal(metrics.steps, 1 + np.arange(len(schedule)))
    since = [i - schedule.rfind("1", 0, i + 1) for i in range(len(schedule))]
    np.testing.assert_array_equal(metrics.local_steps, since)


def test_triggers_without_a_threshold_report_none():
    metrics = run(at_least_every(every_k(2), 3), 2)
    assert np.isnan(metrics.value).all()
    assert np.isnan(metrics.threshold).all()
    assert (metrics.layer == -1).all()


def reporting(fire, number):
    """Fires on steps that a string says, with a value, threshold and layer."""
    wanted = jnp.array([letter == "1" for letter in fire])
    return triggers.stateless(
        lambda seen: triggers.decision(wanted[seen.steps], number, -number, number)
    )


def test_a_decision_of_python_numbers_becomes_arrays():
    decision = triggers.Decision(jnp.array(True), 0.5, 0.25, 3)  # type: ignore
    metrics = run(triggers.stateless(lambda seen: decision), 2)
    assert metrics.value.dtype == np.float32
    assert metrics.value.tolist() == [0.5, 0.5]
    assert metrics.layer.dtype == np.int32


def test_any_of_reports_the_first_that_fires():
    metrics = run(any_of(*map(reporting, ("0010", "0110", "1000"), (1, 2, 3))), 4)
    assert as_text(metrics.synced) == "1110"
    assert metrics.value.tolist() == [3, 2, 1, 1]  # the first one when none fires
    assert metrics.threshold.tolist() == [-3, -2, -1, -1]
    assert metrics.layer.tolist() == [3, 2, 1, 1]


def test_one_replica_decides_for_all_and_values_stay_its_own():
    # The trigger looks at the first element of the gradient.
    def decide(seen: Any):
        first = seen.gradients["bias"][0]
        return triggers.decision(first > 0, first, 0)

    trigger = triggers.stateless(decide)
    tx: Any = cd.adaptive_sync(
        optax.sgd(0.1), trigger, synchronizers.average_gradients(), helpers.AXIS
    )
    gradients = helpers.make_gradients(3, 4)
    firsts = np.array([[-1, -2, 5, -3], [-1, -1, -1, -1], [0, 0, 0, 7]], np.float32)
    for tree, first in zip(gradients, firsts, strict=True):
        tree["bias"][:, 0] = first
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    assert helpers.decisions(history) == [True, False, True]
    for (_, state), first in zip(history, firsts, strict=True):
        np.testing.assert_array_equal(state.metrics.value, first)
