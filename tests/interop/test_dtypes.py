"""Shapes and dtypes: updates have the parameters', states keep their own."""

import contextlib
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest

import curvadion_jax as cd

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64]
AXIS = helpers.AXIS
OPTIMIZERS: dict[str, Any] = {
    "curvadion": cd.curvadion(0.1),
    "averaging_dion": helpers.averaging_dion(),
    "synchronous_dion": cd.presets.synchronous_dion(0.1),
    "paper": cd.presets.paper(0.1),
    "authors_code": cd.presets.authors_code(0.1),
    "diloco": cd.presets.diloco(0.1),
    "muloco": cd.presets.muloco(0.1),
    "mu_dtype": cd.local_muon(0.1, mu_dtype=jnp.bfloat16),
}
# One replica alone sends nothing.
REPLICATED: dict[str, Any] = {"local_muon": cd.local_muon(0.1, axis_name=AXIS)}
QUICK = ("diloco",)


def described(tree):
    """Structure, shapes, dtypes, and which are weakly typed."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


def wide(dtype):
    """Float64 where it is asked for."""
    on = jnp.dtype(dtype).itemsize == 8
    return jax.enable_x64(True) if on else contextlib.nullcontext()


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_dtypes_and_shapes_are_kept(name, dtype):
    tx = OPTIMIZERS[name]
    with wide(dtype):
        params = helpers.make_params(dtype=dtype)
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
    assert described(after) == described(state)
    assert described(updates) == described(jax.eval_shape(lambda: params))


@pytest.mark.slow
def test_gradients_of_another_dtype():
    tx, params = OPTIMIZERS["paper"], helpers.make_params(dtype=jnp.bfloat16)
    gradients = helpers.make_params()
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, gradients, state, params)
    assert described(after) == described(state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


def test_an_embedding_that_saw_nothing_does_not_move():
    # Most rows of an embedding have no gradient on a step; epsilon must not vanish.
    params = {"embed": jnp.ones((3, 2), jnp.float16), "w": jnp.ones((2, 2))}
    gradients = {**params, "embed": params["embed"].at[0].set(1e-3).at[1:].set(0)}
    tx: Any = cd.dion(0.1)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert (updates["embed"][1:] == 0).all()
    assert (updates["embed"][0] < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64], ids=["bf16", "f64"])
@pytest.mark.parametrize("name", REPLICATED)
def test_dtypes_and_shapes_are_kept_on_two_replicas(name, dtype):
    tx = REPLICATED[name]
    with wide(dtype):
        one = helpers.make_params(dtype=dtype)
        params = jax.tree.map(lambda x: jnp.stack([x, x]), one)
        state = jax.eval_shape(jax.vmap(tx.init), params)
        update = jax.vmap(tx.update, axis_name=AXIS)
        updates, after = jax.eval_shape(update, params, state, params)
    assert described(after) == described(state)
    assert described(updates) == described(jax.eval_shape(lambda: params))
