"""Triggers on eight replicas: cases, generated scripts, and their compiled programs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from decision_models import (
    FIRST,
    LIMIT,
    SECOND,
    Model,
    after_steps_model,
    any_of_model,
    at_least_every_model,
    at_most_every_model,
    budget_model,
    delayed_model,
    in_all_model,
    remembered_model,
    signal_model,
)
from decision_scripts import REPLICAS, STEPS, Script, usual_script
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
SGD = optax.sgd(0.1, 0.9)
reconcile = functools.partial(synchronizers.reconcile, momentum=False)


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


def in_all():
    """All the combinators in one trigger."""
    trigger = triggers.any_of(
        triggers.remembered(signal()), triggers.delayed(signal(SECOND))
    )
    return triggers.at_least_every(triggers.at_most_every(trigger, 3), 9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A trigger, what ought to come of it, and what else its program consists of.

    Attributes:
      trigger: the trigger.
      model: makes the model of one replica's.
      synchronizer: the synchronizer.
      ask_every: as of `adaptive_sync`; the model remembers as well.
      first: number of the first step.
      inner: the inner optimizer.
    """

    trigger: triggers.Trigger
    model: Callable[[], Model]
    synchronizer: synchronizers.Synchronizer = dataclasses.field(
        default_factory=reconcile
    )
    ask_every: int | None = None
    first: int = 0
    inner: optax.GradientTransformation = SGD


def only_small(gradients, params):
    """NaN in place of large numbers, which the library takes for gradients."""
    del params
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 1e3, jnp.nan, g), gradients)


def wrapped(wrapper):
    return optax.chain(optax.stateless(only_small), wrapper)


# Each decides by its replica's gradients whether to take a step.
WRAPPERS = {
    "apply_if_finite": wrapped(optax.apply_if_finite(SGD, STEPS)),
    "MultiSteps": wrapped(
        optax.MultiSteps(
            SGD, 3, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation()
    ),
}
SIGNAL = Case(signal(), signal_model)
EVERY_K = Case(triggers.every_k(7), lambda: lambda seen: seen.steps % 7 == 6)
CASES = {
    "signal": SIGNAL,
    "gradients": Case(signal(), signal_model, synchronizers.average_gradients()),
    "fragments": Case(signal(), signal_model, reconcile(fragments=2)),
    "every_k": EVERY_K,
    "any_of": Case(
        triggers.any_of(signal(), signal(SECOND), triggers.every_k(30)),
        lambda: any_of_model(
            signal_model(), signal_model(SECOND), lambda seen: seen.steps == 29
        ),
    ),
    "at_least_every": Case(
        triggers.at_least_every(signal(), 4),
        lambda: at_least_every_model(signal_model(), 4),
    ),
    "at_most_every": Case(
        triggers.at_most_every(signal(), 4),
        lambda: at_most_every_model(signal_model(), 4),
    ),
    "after_steps": Case(
        triggers.after_steps(signal(), 5), lambda: after_steps_model(signal_model(), 5)
    ),
    "delayed": Case(triggers.delayed(signal()), lambda: delayed_model(signal_model())),
    "remembered": Case(
        triggers.at_most_every(triggers.remembered(signal()), 3),
        lambda: at_most_every_model(remembered_model(signal_model()), 3),
    ),
    # Numbers of which no sum is rounded.
    "evenly": Case(
        triggers.evenly(0.375, cost=1.0),
        lambda: lambda seen: seen.syncs + 1 <= 0.375 * (seen.steps + 1),
    ),
    "budget": Case(
        triggers.budget(0.125, signal(), cost=1.0, ahead=2, behind=1),
        lambda: budget_model(0.125, 2, 1),
    ),
    "ask_every": Case(signal(), signal_model, ask_every=3, first=1),
    "ask_every-gradients": Case(
        signal(), signal_model, synchronizers.average_gradients(), ask_every=4
    ),
    "all": Case(in_all(), in_all_model),
    # What the library measures; the model is given its values.
    "momentum_change": Case(triggers.relative_momentum_change(0.4), signal_model),
    "drift": Case(triggers.drift(1.0), signal_model),
    "budget-of-change": Case(
        triggers.budget(0.125, cost=1.0, ahead=2, behind=1),
        lambda: budget_model(0.125, 2, 1),
    ),
    **{
        f"{name}-{wrapper}": dataclasses.replace(case, inner=inner)
        for name, case in {"signal": SIGNAL, "every_k": EVERY_K}.items()
        for wrapper, inner in WRAPPERS.items()
    },
}


def params_of_replicas():
    return {"codes": jnp.zeros((3, 2)), "weights": jnp.linspace(-1, 1, 4)}


@functools.cache
def program(name: str):
    """All steps in one program: gradients -> last state, (metrics, params, anchor)."""
    case = CASES[name]
    tx: Any = cd.adaptive_sync(
        case.inner, case.trigger, case.synchronizer, AXIS, ask_every=case.ask_every
    )
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, params_of_replicas(), mesh)

    def one(state, of_step):
        (gradients, weight), number = of_step
        params, opt_state = state
        updates, opt_state = tx.update(
            gradients, opt_state, params, step=number, weight=weight
        )
        params = optax.apply_updates(params, updates)
        anchor = opt_state.sync_state.anchor
        return (params, opt_state), (opt_state.metrics, params, anchor)

    def local(state, batch):
        batch = jax.tree.map(lambda x: x[0], batch)
        return lax.scan(one, state, (batch, case.first + jnp.arange(STEPS)))

    step = cd.replicas.step(local, mesh, donate=False)
    run = helpers.quick(step, state, batch_of(usual_script()))
    return lambda batch: jax.device_get(run(state, batch))


def batch_of(script: Script):
    """[replicas, steps, ...]: numbers in code, what replicas learn, and weights."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(REPLICAS, STEPS, 4)).astype(np.float32)
    weights[..., 0] += script.spoilt
    codes = encoded(np.moveaxis(script.numbers, 0, -1))
    return {"codes": codes, "weights": weights}, script.weights
