"""All replicas synchronise where any requests it, and every program ends.

What triggers look at is generated, and different on every replica; what they ought to
decide is said by a model of the trigger in plain Python.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.triggers import Measured, Trigger

SGD = optax.sgd(0.1, 0.9)
LIMIT = 1.0
# Parameters of up to 5: an update may miss where all meet by a rounding.
ROUNDING = 2e-6


def signal() -> Trigger:
    """Looks at a number that every replica has in its gradients."""
    look = lambda seen, state: (Measured(seen.gradients["signal"], 1), state)
    return Trigger(look=look, threshold=lambda clock, state: LIMIT)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(
    "synchronizer", [synchronizers.reconcile(), synchronizers.average_gradients()]
)
def test_one_request_of_two_synchronises_both(kind, replica, synchronizer):
    numbers = np.full((6, 2), -3.0, np.float32)
    numbers[1, replica] = 3
    numbers[2] = 1  # at the threshold, and not above it
    numbers[3, replica] = np.nextafter(np.float32(1), np.float32(2))
    numbers[5, replica] = 1e18
    mesh = helpers.mesh_of(kind, 2)
    tx = cd.adaptive_sync(SGD, signal(), synchronizer, mesh)
    params = {"signal": np.float32(0), "w": np.ones(3, np.float32)}
    noise = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    trees = [{"signal": x, "w": w} for x, w in zip(numbers, noise, strict=True)]
    history = list(helpers.run(tx, mesh, params, trees))
    synced = [False, True, False, True, False, True]
    assert helpers.decisions(history) == synced
    state = history[-1][1]
    np.testing.assert_array_equal(state.counters.value, numbers[5])
    assert state.counters.layer.tolist() == [1, 1]
    assert (state.counters.votes, state.counters.syncs) == (6, 3)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("replica", [0, 1])
def test_nan_of_one_replica_is_a_request_beside_a_number(kind, replica):
    """A maximum of floats drops it on a CPU."""
    look = lambda seen, state: (Measured(jnp.log(seen.gradients["signal"])), state)
    trigger = Trigger(look=look, threshold=lambda clock, state: LIMIT)
    mesh = helpers.mesh_of(kind, 2)
    tx = cd.adaptive_sync(SGD, trigger, synchronizers.reconcile(), mesh)
    number = np.float32([1, 1])
    number[replica] = -1
    trees = [{"signal": np.float32([1, 1])}, {"signal": number}]
    history = list(helpers.run(tx, mesh, {"signal": np.float32(0)}, trees))
    assert helpers.decisions(history) == [False, True]


# Scripts: what every trigger sees, and what happens to replicas.

REPLICAS, STEPS = 8, 40
POISON = (np.nan, np.inf, -np.inf)
LARGE = 1e6
SPECIAL = np.float32(
    [
        *(0.0, -0.0, 1.0, -1.0, 1 - 2**-24, 1 + 2**-23, 1e-30, -1e-30, 300, -300),
        *(1.01, 2.0, 0.3),
    ]
)


@dataclasses.dataclass(frozen=True)
class Script:
    """What happens on every step of every replica."""

    signals: np.ndarray  # float32[steps, replicas], what the triggers see
    spoilt: np.ndarray  # float32[steps, replicas], added to an element of the gradient
    weights: np.ndarray  # float32[steps, replicas], how much each counts in a sync


def random_script(seed, spoilt=(), absent=False) -> Script:
    """Mostly zeros; replicas that may be absent go and come again."""
    rng = np.random.default_rng(seed)
    shape = STEPS, REPLICAS
    chosen = rng.choice(np.concatenate([SPECIAL, 3 * SPECIAL]), shape)
    often = rng.choice([0.003, 0.02, 0.1, 1.0])
    signals = np.where(rng.random(shape) < often, chosen, 0).astype(np.float32)
    added, weights = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    if spoilt:
        is_spoilt = rng.random(shape) < rng.choice([0.01, 0.1, 0.5, 0.95])
        added = np.where(is_spoilt, rng.choice(np.float32(spoilt), shape), added)
    if absent:
        changes = rng.random(shape) < rng.choice([0.05, 0.3, 0.9])
        weights = np.logical_xor.accumulate(changes, axis=0).astype(np.float32)
    return Script(signals, added, weights)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a model of a trigger sees: whether anybody requests a sync, and the past."""

    requested: bool
    steps: int
    syncs: int
    since: int


Model = Callable[[Step], bool]


def budget_model(rate, ahead, behind) -> Model:
    def fires(step: Step) -> bool:
        paid = rate * (step.steps + 1)
        allowed = step.syncs + 1 <= paid + ahead
        return (step.requested and allowed) or step.syncs < paid - behind

    return fires


def only_small(gradients, params):
    """NaN in place of large numbers, which the library takes for gradients."""
    del params
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 1e3, jnp.nan, g), gradients)


# Each decides by its replica's gradients whether to take a step.
WRAPPERS = {
    "apply_if_finite": optax.apply_if_finite(SGD, STEPS),
    "MultiSteps": optax.MultiSteps(
        SGD, 3, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A trigger, a model of it, and what else its program consists of."""

    trigger: Trigger
    model: Model
    due: Callable[[int], bool] = lambda steps: True
    synchronizer: Any = dataclasses.field(default_factory=synchronizers.reconcile)
    inner: optax.GradientTransformation = SGD

    @property
    def measures(self):
        return self.trigger.look is not None


SIGNAL = Case(signal(), lambda step: step.requested)
EVERY_K = Case(triggers.every_k(7), lambda step: step.steps % 7 == 6)
CASES = {
    "signal": SIGNAL,
    "gradients": dataclasses.replace(
        SIGNAL, synchronizer=synchronizers.average_gradients()
    ),
    "every_k": EVERY_K,
    "evenly": Case(
        triggers.evenly(0.375),
        lambda step: (step.steps + 1) * 3 // 8 > step.steps * 3 // 8,
    ),
    "at_least_every": Case(
        triggers.at_least_every(signal(), 4),
        lambda step: step.requested or step.since + 1 >= 4,
    ),
    "at_intervals": Case(
        triggers.at_intervals(signal(), 3),
        lambda step: step.requested,
        due=lambda steps: steps % 3 == 2,
    ),
    "all": Case(
        triggers.at_intervals(triggers.at_least_every(signal(), 9), 2),
        lambda step: step.requested or step.since + 1 >= 9,
        due=lambda steps: steps % 2 == 1,
    ),
    **{
        f"{name}-{wrapper}": dataclasses.replace(
            case, inner=optax.chain(optax.stateless(only_small), inner)
        )
        for name, case in {"signal": SIGNAL, "every_k": EVERY_K}.items()
        for wrapper, inner in WRAPPERS.items()
    },
}
PARAMS = {"signal": np.float32(0), "weights": np.linspace(-1, 1, 4, dtype=np.float32)}


def expected(case: Case, script: Script) -> list[bool]:
    """Whether each step synchronises."""
    signals = np.where(np.isfinite(script.spoilt), script.signals, 0)
    largest = np.full(REPLICAS, -np.inf)
    syncs, since, found = 0, 0, []
    for steps in range(STEPS):
        present = script.weights[steps] > 0
        largest = np.maximum(largest, np.where(present, signals[steps], -np.inf))
        requests = (largest > LIMIT) & present
        due = case.due(steps)
        fire = case.model(Step(bool(requests.any()) and due, steps, syncs, since))
        fire = fire and due
        if fire or case.trigger.due(triggers.Clock(0)) is True:
            largest[:] = -np.inf  # without intervals nothing waits
        syncs, since = syncs + fire, 0 if fire else since + 1
        found.append(fire)
    return found


@functools.cache
def program(name: str, kind: str):
    """All steps in one program: script -> last state, (counters, params, anchor)."""
    case = CASES[name]
    mesh = helpers.mesh_of(kind, REPLICAS)
    tx = cd.adaptive_sync(case.inner, case.trigger, case.synchronizer, mesh)

    def one(state, of_step):
        (params, opt_state), (gradients, weight) = state, of_step
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        out = opt_state.counters, params, opt_state.common.anchor
        return (params, opt_state), out

    state = helpers.start(tx, PARAMS, mesh)
    scan = jax.jit(lambda state, given: jax.lax.scan(one, state, given))
    run = helpers.quick(scan, state, given_of(random_script(0)))
    return lambda script: jax.device_get(run(state, given_of(script)))


def given_of(script: Script):
    """[steps, replicas, ...]: the gradients and the weights."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(STEPS, REPLICAS, 4)).astype(np.float32)
    noise[..., 0] += script.spoilt
    return {"signal": script.signals, "weights": noise}, script.weights


def each_step(counter):
    return np.diff(counter, axis=0, prepend=0)


def check(name: str, script: Script, kind: str):
    """Runs a script; the last state."""
    case = CASES[name]
    (_, last), (counters, params, anchor) = program(name, kind)(script)
    synced = counters.since == 0
    assert synced.tolist() == expected(case, script)
    np.testing.assert_array_equal(counters.syncs, np.cumsum(synced))
    np.testing.assert_array_equal(counters.steps, 1 + np.arange(STEPS))
    due = [case.due(steps) for steps in range(STEPS)]
    votes = np.cumsum(due) if case.measures else np.zeros(STEPS)
    np.testing.assert_array_equal(counters.votes, votes)
    # Where gradients are averaged, those are excluded that have none.
    finite = np.isfinite(script.spoilt)
    after_step = isinstance(case.synchronizer, synchronizers.AfterStep)
    without = np.zeros_like(finite) if after_step else ~finite
    away = ~without & (script.weights == 0)
    for counter, events in (
        (counters.nonfinite, ~finite),
        (counters.excluded, without & synced[:, None]),
        (counters.absent, away & synced[:, None]),
    ):
        np.testing.assert_array_equal(each_step(counter), events)
    for leaf in jax.tree.leaves(params):
        assert np.isfinite(leaf).all()
    if after_step and np.all(script.weights):  # together after each sync
        together, wanted = params["weights"][synced], anchor["weights"][synced]
        wanted = np.broadcast_to(wanted[:, None], together.shape)
        np.testing.assert_allclose(together, wanted, rtol=0, atol=ROUNDING)
    return last


KINDS = {
    "usual": {},
    "not finite": {"spoilt": POISON},
    "come and go": {"spoilt": POISON, "absent": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_sync_takes_place_where_the_model_says_so(name, kind):
    for seed in range(12):
        check(name, random_script(seed, **KINDS[kind]), "simulated")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["signal", "at_intervals", "signal-apply_if_finite"])
def test_eight_devices_decide_alike(name):
    for seed in range(6):
        check(name, random_script(seed, POISON, True), "mesh")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "-" in name])
def test_wrappers_that_decide_for_one_replica_are_fine_inside(name):
    for seed in range(6):
        script = random_script(seed, (np.nan, LARGE, LARGE))
        state = check(name, script, "simulated").rows.inner_state
        (inner,) = [x for x in state if isinstance(x, tuple) and x]
        # In place of what is not finite the library shows them zeros.
        large = (script.spoilt == LARGE).sum(0)
        if isinstance(inner, optax.ApplyIfFiniteState):
            np.testing.assert_array_equal(inner.total_notfinite, large)
        else:
            np.testing.assert_array_equal(inner.gradient_step, (STEPS - large) // 3)
            np.testing.assert_array_equal(inner.mini_step, (STEPS - large) % 3)
