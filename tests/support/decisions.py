"""Triggers on eight replicas: what happens to them, and what they ought to decide.

A case is a trigger in its optimizer, with a model of it in plain Python; a script is
what every replica's trigger sees on every step, given or generated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
REPLICAS, STEPS = 8, 50
# Rows of what a replica's trigger sees on a step.
FIRST, SECOND, LIMIT = range(3)
POISON = (np.nan, np.inf, -np.inf)
LARGE = 1e6


class Script(NamedTuple):
    """What happens on every step of every replica."""

    numbers: np.ndarray  # float32[3, replicas, steps], what the triggers see
    spoilt: np.ndarray  # float32[replicas, steps], added to an element of the gradient
    weights: np.ndarray  # float32[replicas, steps], how much each counts in a sync


def usual_script() -> Script:
    """No signal is above the limit."""
    numbers = np.zeros((3, REPLICAS, STEPS), np.float32)
    numbers[LIMIT] = 1
    shape = REPLICAS, STEPS
    return Script(numbers, np.zeros(shape, np.float32), np.ones(shape, np.float32))


def one_by_one() -> Script:
    """Every replica is once the only one that requests a sync, by another number."""
    script = usual_script()
    numbers = (np.nan, np.inf, 1 + 2**-23, 3e38, -np.nan, 1.01, 2, 1e30)
    for index, number in enumerate(numbers):
        script.numbers[FIRST, index, 6 * index + 2] = number
    return script


def cooling_down() -> Script:
    """Replica 5 is excluded from a sync, and requests another one ever after."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.spoilt[5, 4] = np.nan
    script.numbers[FIRST, 5, 5:] = 2
    return script


def staying_away() -> Script:
    """Replica 5 misses a sync, and requests others ever after; then nobody is there."""
    script = usual_script()
    script.numbers[FIRST, 2, 4] = 2
    script.weights[5, 3:40] = 0
    script.numbers[FIRST, 5, 5:] = 2
    script.weights[:, 20:30] = 0
    return script


SPECIAL = np.float32(
    [
        *(0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf),
        *(1 - 2**-24, 1 + 2**-23, 1e-45, -1e-45, 1e-40, 2**-126),
        *(1e-30, 1e30, 3e38, -3e38, 0.1, 0.3, 1.01),
    ]
)


def random_script(seed, spoilt=(), absent=False) -> Script:
    """Mostly 0 for the signals and 1 for the limit; the rest are special numbers.

    Replicas that may be absent go and come again.
    """
    rng = np.random.default_rng(seed)
    numbers, spoilt_numbers, weights = usual_script()
    often = rng.choice([0.0, 0.003, 0.02, 0.1, 1.0])
    # The same numbers with the bits of bfloat16, and some that have nothing special.
    palette = np.concatenate([SPECIAL, rng.normal(size=8).astype(np.float32)])
    palette = np.concatenate([palette, palette.astype(jnp.bfloat16)])
    chosen = rng.choice(palette.astype(np.float32), numbers.shape)
    numbers = np.where(rng.random(numbers.shape) < often, chosen, numbers)
    if spoilt:
        chosen = rng.choice(np.float32(spoilt), spoilt_numbers.shape)
        is_spoilt = rng.random(chosen.shape) < rng.choice([0.01, 0.1, 0.5, 0.95])
        spoilt_numbers = np.where(is_spoilt, chosen, spoilt_numbers)
    if absent:
        changes = rng.random(weights.shape) < rng.choice([0.05, 0.3, 0.9])
        weights = np.logical_xor.accumulate(changes, axis=1)
    return Script(numbers, spoilt_numbers, np.float32(weights))


class Seen(NamedTuple):
    """What the model of one replica's trigger sees on a step."""

    numbers: np.ndarray  # float32[3], those of the rows
    steps: int  # taken before this one
    syncs: int  # among them
    local_steps: int  # since the last sync, or since the start
    reported: float  # what the library says that it compared with


Model = Callable[[Seen], bool]


def signal_model(row=FIRST) -> Model:
    return lambda seen: not seen.numbers[row] <= seen.numbers[LIMIT]


def at_least_every_model(model: Model, k: int) -> Model:
    return lambda seen: model(seen) | (seen.local_steps + 1 >= k)


def at_intervals_model(model: Model) -> Model:
    """What was requested since the last sync."""
    requested = []

    def request(seen: Seen) -> bool:
        if model(seen):
            requested.append(seen.syncs)
        return seen.syncs in requested

    return request


def budget_model(rate=0.125, ahead=2, behind=1) -> Model:
    def request(seen: Seen) -> bool:
        wanted = not seen.numbers[FIRST] <= seen.reported
        paid = rate * (seen.steps + 1)
        allowed = seen.syncs + 1 <= paid + ahead
        return (wanted and allowed) or seen.syncs < paid - behind

    return request


def encoded(numbers):
    """The bits of float32 as two numbers from 0 to 1, which are finite: [..., 2]."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return np.stack([bits >> 16, bits & 0xFFFF], -1).astype(np.float32) / 2**16


def decoded(codes):
    high, low = jnp.moveaxis((codes * 2**16).astype(jnp.uint32), -1, 0)
    return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


def signal(row=FIRST):
    def decide(seen: Any):
        numbers = decoded(seen.gradients["codes"])
        value, limit = numbers[row], numbers[LIMIT]
        return triggers.decision(~(value <= limit), value, limit, row)

    return triggers.stateless(decide)


SGD = optax.sgd(0.1, 0.9)
GRADIENTS = synchronizers.average_gradients()


@dataclasses.dataclass(frozen=True)
class Case:
    """A trigger, what ought to come of it, and what else its program consists of."""

    trigger: triggers.Trigger
    model: Callable[[], Model]  # makes that of one replica
    synchronizer: synchronizers.Synchronizer = dataclasses.field(
        default_factory=lambda: synchronizers.reconcile()
    )
    interval: int = 1  # of the steps on which replicas vote
    inner: optax.GradientTransformation = SGD


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
SIGNAL = Case(signal(), signal_model)
EVERY_K = Case(triggers.every_k(7), lambda: lambda seen: seen.steps % 7 == 6)
CASES = {
    "signal": SIGNAL,
    "gradients": Case(signal(), signal_model, GRADIENTS),
    "every_k": EVERY_K,
    # Numbers of which no sum is rounded.
    "evenly": Case(
        triggers.evenly(0.375),
        lambda: lambda seen: (seen.steps + 1) * 3 // 8 > seen.steps * 3 // 8,
    ),
    "at_least_every": Case(
        triggers.at_least_every(signal(), 4),
        lambda: at_least_every_model(signal_model(), 4),
    ),
    "at_intervals": Case(
        triggers.at_intervals(signal(), 3),
        lambda: at_intervals_model(signal_model()),
        interval=3,
    ),
    "budget": Case(triggers.budget(0.125, signal(), ahead=2, behind=1), budget_model),
    "all": Case(
        triggers.at_intervals(triggers.at_least_every(signal(), 9), 2),
        lambda: at_intervals_model(at_least_every_model(signal_model(), 9)),
        interval=2,
    ),
    # What the library measures; the model is given its values.
    "momentum_change": Case(triggers.relative_momentum_change(0.4), signal_model),
    "budget-of-change": Case(triggers.budget(0.125, ahead=2, behind=1), budget_model),
    **{
        f"{name}-{wrapper}": dataclasses.replace(
            case, inner=optax.chain(optax.stateless(only_small), inner)
        )
        for name, case in {"signal": SIGNAL, "every_k": EVERY_K}.items()
        for wrapper, inner in WRAPPERS.items()
    },
}


@functools.cache
def program(name: str):
    """All steps in one program: script -> last state, (metrics, params, anchor)."""
    case = CASES[name]
    tx: Any = cd.adaptive_sync(case.inner, case.trigger, case.synchronizer, AXIS)
    params = {"codes": jnp.zeros((3, 2)), "weights": jnp.linspace(-1, 1, 4)}
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, params, mesh)

    def one(state, of_step):
        (params, opt_state), (gradients, weight) = state, of_step
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        params = optax.apply_updates(params, updates)
        anchor = opt_state.sync_state.anchor
        return (params, opt_state), (opt_state.metrics, params, anchor)

    def local(state, batch):
        return lax.scan(one, state, jax.tree.map(lambda x: x[0], batch))

    step = cd.replicas.step(local, mesh, donate=False)
    run = helpers.quick(step, state, batch_of(usual_script()))
    return lambda script: jax.device_get(run(state, batch_of(script)))


def batch_of(script: Script):
    """[replicas, steps, ...]: numbers in code, what replicas learn, and weights."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(REPLICAS, STEPS, 4)).astype(np.float32)
    weights[..., 0] += script.spoilt
    codes = encoded(np.moveaxis(script.numbers, 0, -1))
    return {"codes": codes, "weights": weights}, script.weights
