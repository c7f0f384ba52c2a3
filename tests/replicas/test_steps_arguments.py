"""What several steps in one program are given: batches, and what they share."""

import jax.numpy as jnp
import numpy as np
import pytest

import curvadion_jax as cd

REPLICAS = 2


def test_what_is_shared_says_how_many_steps():
    mesh = cd.replicas.make_mesh(REPLICAS)
    run = cd.replicas.steps(lambda state, batch, x: (state + x, x), mesh)
    state = cd.replicas.replicate(jnp.zeros(2), mesh)
    state, found = run(state, {}, jnp.arange(3.0))
    assert state.tolist() == [[3.0, 3.0]] * REPLICAS
    assert found.shape == (3, REPLICAS)


def test_shared_arguments_are_of_a_step_each():
    def count(state, batch, step):
        return state + step * batch.sum(), {"step": step}

    mesh = cd.replicas.make_mesh(1)
    state = cd.replicas.replicate(jnp.float32(0), mesh)
    state, found = cd.replicas.steps(count, mesh)(
        state, jnp.ones((3, 1)), jnp.arange(3)
    )
    assert (state.tolist(), found["step"].tolist()) == ([3], [[0], [1], [2]])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        pytest.param({}, r"need one leading axis of steps", id="none"),
        pytest.param({"a": np.ones((2, 1)), "b": np.ones((3, 1))}, "got {", id="two"),
        pytest.param(np.ones(()), "stack the batches", id="scalar"),
        pytest.param(np.ones((3,)), "cannot be divided over 1 replicas", id="no rows"),
    ],
)
def test_batches_that_are_none_are_refused(batches, message):
    mesh = cd.replicas.make_mesh(1)
    state = cd.replicas.replicate(jnp.float32(0), mesh)
    run = cd.replicas.steps(lambda state, batch: (state, {}), mesh)
    with pytest.raises(ValueError, match=message):
        run(state, batches)
