"""Shapes and dtypes: updates have the parameters', states keep their own."""

import contextlib
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest

import curvadion_jax as cd

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64]
OPTIMIZERS: dict[str, Any] = {
    "curvadion": lambda mesh: cd.curvadion(0.1, mesh=mesh),
    "at_intervals": lambda mesh: cd.curvadion(0.1, mesh=mesh, decision_interval=2),
    "averaging_dion": lambda mesh: helpers.averaging_dion(mesh=mesh),
    "synchronous_dion": lambda mesh: cd.presets.synchronous_dion(0.1, mesh=mesh),
    "synchronous_adamw": lambda mesh: cd.presets.synchronous_adamw(0.1, mesh=mesh),
    "paper": lambda mesh: cd.presets.paper(0.1, mesh=mesh),
    "authors_code": lambda mesh: cd.presets.authors_code(0.1, mesh=mesh),
    "diloco": lambda mesh: cd.presets.diloco(0.1, mesh=mesh),
    "muloco": lambda mesh: cd.presets.muloco(0.1, mesh=mesh),
    "local_muon": lambda mesh: cd.local_muon(0.1, mesh=mesh),
    "mu_dtype": lambda mesh: cd.local_muon(0.1, mu_dtype=jnp.bfloat16, mesh=mesh),
}
QUICK = ("diloco",)
TWO = cd.replicas.simulated(2)


def described(tree):
    """Structure, shapes, dtypes, and which are weakly typed."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


def wide(dtype):
    """Float64 where it is asked for."""
    on = jnp.dtype(dtype).itemsize == 8
    return jax.enable_x64(True) if on else contextlib.nullcontext()


def traced(tx, params, gradients=None):
    """Shapes of (state, updates, state after)."""
    gradients = params if gradients is None else gradients
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, gradients, state, params)
    return state, updates, after


@pytest.mark.parametrize("mesh", [None, TWO], ids=["one", "two"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_dtypes_and_shapes_are_kept(name, dtype, mesh):
    with wide(dtype):
        params = cd.replicas.replicate(helpers.make_params(dtype=dtype), mesh)
        state, updates, after = traced(OPTIMIZERS[name](mesh), params)
    assert described(after) == described(state)
    assert described(updates) == described(jax.eval_shape(lambda: params))


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, ["diloco", "paper"]))
def test_gradients_of_another_dtype(name):
    params = helpers.make_params(dtype=jnp.bfloat16)
    rows, gradients = (
        cd.replicas.replicate(tree, TWO) for tree in (params, helpers.make_params())
    )
    state, updates, after = traced(OPTIMIZERS[name](TWO), rows, gradients)
    assert described(after) == described(state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("make", [cd.local_muon, cd.curvadion, cd.dion])
def test_every_first_moment_has_the_dtype_that_is_asked_for(make):
    """Of matrices, and of what AdamW trains; AdamW's second moment keeps its own."""
    tx = make(0.1, mu_dtype=jnp.bfloat16)
    state = jax.eval_shape(tx.init, helpers.make_params())
    found = {"momentum": [], "mu": [], "nu": []}
    for path, leaf in jax.tree.leaves_with_path(state):
        for name in found:
            if f".{name}[" in jax.tree_util.keystr(path):
                found[name].append(leaf.dtype)
    assert len(found["momentum"] + found["mu"]) == len(helpers.SHAPES)
    assert {*found["momentum"], *found["mu"]} == {jnp.dtype(jnp.bfloat16)}
    assert {*found["nu"]} == {jnp.dtype(jnp.float32)}


def test_an_embedding_that_saw_nothing_does_not_move():
    # Most rows of an embedding have no gradient on a step; epsilon must not vanish.
    params = {"embedding": jnp.ones((3, 2), jnp.float16), "kernel": jnp.ones((2, 2))}
    tiny = params["embedding"].at[0].set(1e-3).at[1:].set(0)
    gradients = {**params, "embedding": tiny}
    tx: Any = cd.dion(0.1)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert (updates["embedding"][1:] == 0).all()
    assert (updates["embedding"][0] < 0).all()
