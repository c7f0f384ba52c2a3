"""Microbatches are the whole batch."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvadion_jax as cd

ROWS = 16
# Sums of rows in another order.
ROUNDING = 1e-6
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :1]}


@pytest.mark.parametrize("has_aux", [False, True])
def test_microbatches_are_the_whole_batch(has_aux):
    params = {"w": jnp.asarray(X[:6, :1]), "b": jnp.zeros(1)}

    def loss_fn(params, batch, scale, power=2):
        error = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
        loss = jnp.mean(scale * jnp.abs(error) ** power)
        aux = {"norm": jnp.mean(error), "rows": jnp.int32(len(error))}
        return (loss, aux) if has_aux else loss

    scale = np.linspace(1, 2, ROWS, dtype=np.float32)[:, None]
    whole = jax.value_and_grad(loss_fn, has_aux=has_aux)
    parts = cd.replicas.value_and_grad(loss_fn, has_aux=has_aux, microbatches=4)
    expected = whole(params, BATCH, scale, power=3)
    found = jax.jit(lambda p: parts(p, BATCH, scale, power=3))(params)
    if has_aux:
        assert found[0][1]["rows"] == 4
        expected[0][1]["rows"] = 4
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=ROUNDING),
        found,
        expected,
    )


def squared(w, b, x, y):
    return jnp.mean((x @ w + b[None] - y) ** 2)


@pytest.mark.parametrize(
    ("argnums", "order"),
    [(0, "wxy"), (-1, "xyw"), ((0, 1), "wbxy"), ((1, -1), "xwyb"), ((-1, 1), "xwyb")],
)
def test_what_is_differentiated_may_stand_anywhere(argnums, order):
    """And all other arguments are divided into rows."""
    named = {"w": jnp.asarray(X[:6, :1]), "b": jnp.ones(1), "x": X, "y": X[:, :1]}

    def loss_fn(*given):
        return squared(**{"b": jnp.ones(1)} | dict(zip(order, given, strict=True)))

    given = [named[name] for name in order]
    expected = jax.value_and_grad(loss_fn, argnums=argnums)(*given)
    parts = cd.replicas.value_and_grad(loss_fn, argnums=argnums, microbatches=4)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=ROUNDING),
        parts(*given),
        expected,
    )


def test_what_is_returned_beside_may_be_a_constant():
    def loss_fn(params, batch):
        loss = jnp.mean(batch["x"] @ params - batch["y"])
        return loss, {"other_loss": 0.5, "is_used": True, "number": 3}

    params = jnp.asarray(X[:6, :1])
    parts = cd.replicas.value_and_grad(loss_fn, has_aux=True, microbatches=4)
    for function in (parts, jax.jit(parts)):
        (_, aux), _ = function(params, BATCH)
        assert aux == {"other_loss": 0.5, "is_used": True, "number": 3}


def test_microbatches_inside_a_step():
    """And under `shard_map`, where types tell replicas apart."""
    mesh = cd.replicas.make_mesh(2)
    loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    differentiate = cd.replicas.value_and_grad(loss_fn, microbatches=2)

    def train(w, x):
        value, gradient = differentiate(w, x)
        return w, {"value": value, "gradient": gradient}

    w = jnp.ones((6, 2))
    state = cd.replicas.replicate(w, mesh)
    expected = [jax.value_and_grad(loss_fn)(w, x) for x in np.split(X, 2)]
    for run in (cd.replicas.step(train, mesh), helpers.manual(train, mesh, state)):
        _, found = run(state, X)
        for replica, (value, gradient) in enumerate(expected):
            np.testing.assert_allclose(found["value"][replica], value, rtol=1e-5)
            np.testing.assert_allclose(
                found["gradient"][replica], gradient, rtol=1e-5, atol=ROUNDING
            )
        state = cd.replicas.replicate(w, mesh)


@pytest.mark.parametrize(
    ("microbatches", "message"), [(0, "microbatches"), (3, "into 3 micro-batches")]
)
def test_microbatches_that_do_not_fit(microbatches, message):
    with pytest.raises(ValueError, match=message):
        cd.replicas.value_and_grad(
            lambda w, x: jnp.mean(w * x), microbatches=microbatches
        )(1.0, X)
