"""Several sites in one process, each in a thread of its own, with one store."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import sites

STEPS, EVERY = 12, 4


def start_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    return {
        "kernel": jax.random.normal(keys[0], (24, 16), dtype),
        "bias": jax.random.normal(keys[1], (16,), dtype),
    }


def target(site: int, step: int):
    """What a site's step draws the parameters to: its data."""
    key = jax.random.fold_in(jax.random.key(1 + site), step)
    return jax.tree.map(lambda x: x * 0.5 + jax.random.normal(key), start_params())


def make_step(inner: optax.GradientTransformation):
    """A site's own step, by elements alone: the same bits under vmap."""

    @jax.jit
    def step(params, state, target):
        gradients = jax.tree.map(jnp.subtract, params, target)
        updates, state = inner.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(
    site: sites.Site, number: int, inner, steps=STEPS, leave=False, params=None
) -> Any:
    """One site's run to its end, from its start or from parameters."""
    step = make_step(inner)
    params = site.start(start_params()) if params is None else params
    state = inner.init(params)
    for index in range(steps):
        params, state = step(params, state, target(number, index))
        params = site.sync(params)
    return site.leave(params) if leave else params


def together(runs: Mapping[str, Callable[[], Any]], seconds: float = 120) -> dict:
    """Results of functions that run at once; raises what one of them raised."""
    found: dict[str, Any] = {}
    errors: list[BaseException] = []

    def run(name, function):
        try:
            found[name] = function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert len(found) == len(runs), f"only {sorted(found)} have ended"
    return found
