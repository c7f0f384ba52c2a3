"""The quadratic synchronization rule, against the paper's rounds written as a loop."""

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
from curvadion_jax.triggers import quadratic_period


def run(trigger, steps):
    """Whether each step of one replica synchronised."""
    tx: Any = cd.adaptive_sync(
        optax.sgd(0.1), trigger, synchronizers.average_gradients()
    )
    params = {"w": jnp.zeros(2)}

    def body(state, _):
        state = tx.update(params, state, params)[1]
        return state, state.metrics.synced

    scan = jax.jit(lambda state: lax.scan(body, state, length=steps)[1])
    state = tx.init(params)
    return np.asarray(helpers.quick(scan, state)(state))


def rounds(rate, alpha, k, steps, warmup=0):
    """The steps after which replicas synchronise, one round after the other."""
    ends, start = [], 0
    while start < steps:
        eta = rate(max(start, warmup))
        period = max(k, math.floor((alpha / eta) ** 2)) if eta else math.inf
        start += period
        ends.append(start)
    return [end for end in ends if end <= steps]


def cosine(step):
    return 0.05 * (1 + math.cos(math.pi * min(step / 400, 1)))


def ramp(step):
    return min(step / 30, 1) * cosine(step)


SCHEDULES = {
    "constant": (lambda step: 0.1, 0.1),
    "cosine": (cosine, optax.cosine_decay_schedule(0.1, 400)),
    "warm-up": (
        ramp,
        lambda step: (
            jnp.minimum(step / 30, 1) * optax.cosine_decay_schedule(0.1, 400)(step)
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("alpha", "k"), [(0.173, 1), (0.31, 4), (0.0, 5), (0.61, 3)])
def test_rounds_of_the_paper(name, alpha, k):
    rate, schedule = SCHEDULES[name]
    warmup = 30 if name == "warm-up" else 0
    synced = run(quadratic_period(schedule, alpha, k, warmup=warmup), 400)
    expected = rounds(rate, alpha, k, 400, warmup)
    assert (1 + np.flatnonzero(synced)).tolist() == expected
    assert len(expected) > 2


@pytest.mark.parametrize(("rate", "period"), [(0.1, 9), (0.3, 1), (0.03, 100)])
def test_whole_ratios_are_not_rounded_down(rate, period):
    # 0.3 / 0.1 and 0.3 / 0.03 lie just below a whole number in floating point.
    synced = run(quadratic_period(rate, 0.3), 200)
    assert (1 + np.flatnonzero(synced)).tolist() == list(range(period, 201, period))


def test_a_learning_rate_of_zero_never_synchronises_and_does_not_overflow():
    assert not run(quadratic_period(0.0, 0.1, 2), 50).any()
    assert not run(quadratic_period(1e-30, 0.1, 2), 50).any()


@pytest.mark.parametrize(("rate", "alpha"), [(0.0, 0.0), (jnp.nan, 0.1)])
def test_an_undefined_ratio_gives_the_smallest_period(rate, alpha):
    synced = run(quadratic_period(lambda step: rate, alpha, 2), 6)
    assert synced.tolist() == [False, True] * 3


def test_a_sync_of_another_trigger_begins_a_round():
    # Rounds of 5 steps, and a sync after steps 8 and 16 whatever they are at.
    trigger = triggers.any_of(triggers.every_k(8), quadratic_period(0.1, 0.23))
    synced = run(trigger, 24)
    assert (1 + np.flatnonzero(synced)).tolist() == [5, 8, 13, 16, 21, 24]


def test_the_warm_up_is_a_number_of_steps():
    with pytest.raises(TypeError, match="warmup must be an int"):
        quadratic_period(0.1, 1.0, warmup=0.5)  # type: ignore
