"""What replicas request, reduced to what all of them do."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _collectives, _guards


def largest(request: jax.Array, asked: Any, axis_name: str | None) -> jax.Array:
    """0 for a local step of all replicas, else 1 + the variant of their sync."""
    if asked is True:
        which = _collectives.largest(request, axis_name)
    else:
        which = lax.cond(
            asked,
            lambda request: _collectives.largest(request, axis_name),
            lambda request: jnp.zeros([], jnp.int32),
            request,
        )
    return which if axis_name is None else _guards.one_decision(which)


def is_asked(
    step: Any, ask_every: int | None, axis_name: str | None
) -> jax.Array | bool:
    """Whether replicas reduce their requests on this step; the same on all of them."""
    if ask_every is None:
        return True
    if step is None:
        raise ValueError(
            f"adaptive_sync(ask_every={ask_every}) needs the number of the step, from "
            "outside and the same on all replicas: call update(gradients, state, "
            "params, step=step), with the step as a further argument of the training "
            "step, which replicas.step passes on as train(state, batch, step)"
        )
    step = jnp.asarray(step)
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(
            f"step must be one integer, the number of the step, got {step.dtype}"
            f"{list(step.shape)}"
        )
    _guards.require_shared(step, axis_name, "the step")
    return step % ask_every == 0
