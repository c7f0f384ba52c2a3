"""What a reviewer would have run instead, and no method of the library is.

`large_batch` is the alternative to local steps at the same bytes: gradients of several
steps are accumulated, their mean is sent in few bits with error feedback, and Muon
takes one step.
`outer_nesterov` is MuLoCo with one worker: an outer step every few steps of any
optimizer, here of a synchronous one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measuring
import optax

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers


class Accumulated(NamedTuple):
    """Gradients that were not sent yet, and the state of the optimizer."""

    owed: Any
    of_inner: Any


def large_batch(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    period: int,
    mesh: Any,
    bits: int = 2,
) -> optax.GradientTransformationExtraArgs:
    """Muon on the mean gradient of `period` steps of all replicas, sent in few bits.

    Schedules count the steps that Muon takes. Nothing moves on the others.
    """
    return cd.adaptive_sync(
        accumulating(muon(learning_rate, momentum), period),
        triggers.every_k(period),
        average_accumulated(compressors.quantize(bits)),
        mesh,
    )


def muon(
    learning_rate: optax.ScalarOrSchedule, momentum: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """Muon of one replica, as in `presets.synchronous_muon`."""
    make = optax.inject_hyperparams(
        lambda momentum: measuring.muon(learning_rate, beta=momentum, adam_b2=0.95)
    )
    return make(momentum=momentum)


def accumulating(
    inner: optax.GradientTransformationExtraArgs, period: int
) -> optax.GradientTransformationExtraArgs:
    """Collects the mean of `period` gradients; `inner` steps when told to."""

    def init(params):
        return Accumulated(optax.tree.zeros_like(params), inner.init(params))

    def update(updates, state, params=None, *, sent=False, **extra_args):
        if sent:
            updates, of_inner = inner.update(
                updates, state.of_inner, params, **extra_args
            )
            return updates, state._replace(of_inner=of_inner)
        owed = jax.tree.map(lambda x, g: x + g / period, state.owed, updates)
        return optax.tree.zeros_like(updates), state._replace(owed=owed)

    return optax.GradientTransformationExtraArgs(init, update)


def average_accumulated(
    compressor: compressors.Compressor,
) -> synchronizers.WithinStep:
    """Sends what `accumulating` has collected, with error feedback in its state."""

    def sync(take, gradients, inner_state, state, residual, part):
        _, collected = take(gradients, inner_state)
        own = part.weighted(collected.owed)
        mean, unsent = compressor.mean_with_feedback(
            own, optax.tree.zeros_like(own), part.group
        )
        updates, new = take(mean, collected, sent=True)
        return updates, new._replace(owed=unsent), state, residual

    def payload(params, inner_state, layout):
        return compressor.payload_by_device(params, layout)

    return synchronizers.WithinStep(sync, payload)


class OuterState(NamedTuple):
    """Steps taken, the parameters after the last outer step, and the outer state."""

    count: jax.Array
    anchor: Any
    of_outer: Any


def outer_nesterov(
    period: int, learning_rate: float, momentum: float
) -> optax.GradientTransformation:
    """Every `period` steps a Nesterov step along the way since the last one.

    It follows an optimizer in a chain, and works on its updates. The inner momentum
    stays.
    """
    outer = optax.sgd(learning_rate, momentum, nesterov=True)

    def init(params):
        anchor = jax.tree.map(jnp.copy, params)  # both are donated
        return OuterState(jnp.zeros([], jnp.int32), anchor, outer.init(params))

    def update(updates, state, params=None):
        moved = optax.apply_updates(params, updates)
        way = optax.tree.sub(state.anchor, moved)
        step, of_outer = outer.update(way, state.of_outer)
        anchor = optax.apply_updates(state.anchor, step)
        is_due = (state.count + 1) % period == 0
        choose = lambda new, old: jax.tree.map(
            lambda x, y: jnp.where(is_due, x, y), new, old
        )
        updates = choose(optax.tree.sub(anchor, params), updates)
        return updates, OuterState(
            state.count + 1,
            choose(anchor, state.anchor),
            choose(of_outer, state.of_outer),
        )

    return optax.GradientTransformation(init, update)
