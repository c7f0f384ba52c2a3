"""A model that fails on rows that it captured is told to take them as arguments."""

import jax
import jax.numpy as jnp
import pytest

from curvadion_jax import replicas

MESH = replicas.simulated(2)
WEIGHTS = jnp.ones((2, 3, 3))


def failing_step(weights, batch):
    def loss_fn(weights):
        return jnp.sum(batch.reshape(-1, 5) @ weights)  # [2, 5, 3] has no 5 columns

    return replicas.map(jax.grad(loss_fn), MESH)(weights)


def test_an_error_of_a_closure_over_rows_has_a_note():
    with pytest.raises(TypeError) as caught:
        jax.jit(failing_step)(WEIGHTS, jnp.ones((2, 5, 3)))
    assert any("Pass them as arguments" in note for note in caught.value.__notes__)


def test_an_error_of_a_function_of_arguments_has_no_such_note():
    loss_fn = lambda weights, x: jnp.sum(x.reshape(-1, 5) @ weights)
    step = jax.jit(replicas.map(jax.grad(loss_fn), MESH))
    with pytest.raises(TypeError) as caught:
        step(WEIGHTS, jnp.ones((2, 5, 3)))
    notes = getattr(caught.value, "__notes__", [])
    assert not any("Pass them as arguments" in note for note in notes)
