"""Parameters that are not those of the last step plus its updates are counted."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

TWO = cd.replicas.simulated(2)
PARAMS = {"w": jnp.arange(1.0, 5.0).reshape(2, 2), "b": jnp.ones(3)}
STEPS, BAD = 6, 3  # a local step and a sync each; step 3 is a sync
reconcile = synchronizers.reconcile


def optimizer(mesh=TWO, k=2) -> Any:
    inner, outer = optax.adam(0.05), optax.sgd(1.0, 0.4, nesterov=True)
    return cd.adaptive_sync(inner, triggers.every_k(k), reconcile(outer), mesh)


def by_row(function):
    """Of each replica, what it makes of its loss, its updates and its parameters."""
    return lambda *rows: cd.replicas.map(function, TWO)(*rows)


def where(condition, tree, other):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def scaled(updates, factor):
    return jax.tree.map(lambda u: factor.astype(u.dtype) * u, updates)


# What a user's step makes of finished updates, by its replica's own loss.
SPELLINGS = {
    "where(isfinite(loss), u, 0)": lambda loss, u, p: optax.apply_updates(
        p, jax.tree.map(lambda x: jnp.where(jnp.isfinite(loss), x, 0.0), u)
    ),
    "where(isfinite(loss), u, zeros_like(u))": lambda loss, u, p: optax.apply_updates(
        p, where(jnp.isfinite(loss), u, zeros(u))
    ),
    "isfinite(loss) * u": lambda loss, u, p: optax.apply_updates(
        p, scaled(u, jnp.isfinite(loss))
    ),
    "cond": lambda loss, u, p: optax.apply_updates(
        p, jax.lax.cond(jnp.isfinite(loss), lambda u: u, zeros, u)
    ),
    "u * min(1, c / norm(u))": lambda loss, u, p: optax.apply_updates(
        p, scaled(u, jnp.minimum(1.0, 0.15 / optax.tree.norm(u)))
    ),
    "where(isfinite(loss), new, old)": lambda loss, u, p: where(
        jnp.isfinite(loss), optax.apply_updates(p, u), p
    ),
}
AS_THEY_ARE = lambda loss, u, p: optax.apply_updates(p, u)


def train(tx, apply, steps=STEPS):
    """The last report: on step `BAD` the loss of replica 1 is not finite."""
    params = cd.replicas.replicate(PARAMS, TWO)

    @jax.jit
    def step(params, state, gradients, loss):
        updates, state = tx.update(gradients, state, params)
        return apply(loss, updates, params), state

    state = tx.init(params)
    rng = np.random.default_rng(0)
    for index in range(steps):
        gradients = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params)
        loss = np.float32([1, np.nan if index == BAD else 1])
        params, state = step(params, state, gradients, loss)
    return metrics.read(state)


@pytest.mark.parametrize("name", SPELLINGS)
def test_updates_that_the_step_changes_are_counted_as_displaced(name):
    report = train(optimizer(), by_row(SPELLINGS[name]))
    if name.startswith("u * min"):  # any large step
        assert min(report["displaced"]) >= 1
    else:
        assert report["displaced"] == [0, 1]


def test_updates_as_they_are_displace_nothing():
    assert "displaced" not in train(optimizer(), by_row(AS_THEY_ARE))


AFTER = {
    "clip": optax.clip(0.01),
    "scale": optax.scale(0.5),
    "add_decayed_weights": optax.add_decayed_weights(-0.01),
    "ema": optax.ema(0.9),
    "masked": optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
}


@pytest.mark.parametrize("name", helpers.slow_but(("scale", "masked"), AFTER), ids=str)
def test_what_follows_the_optimizer_in_a_chain_displaces_on_every_step(name):
    report = train(optax.chain(optimizer(), AFTER[name]), AS_THEY_ARE)
    assert report["displaced"] == [STEPS - 1] * 2  # seen on the next step


AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(0.1),
    "zero_nans": lambda tx: optax.chain(tx, optax.zero_nans()),
    "partition": lambda tx: optax.partition(
        {"train": tx, "frozen": optax.set_to_zero()}, {"w": "train", "b": "frozen"}
    ),
}


@pytest.mark.parametrize("name", helpers.slow_but(("MultiSteps",), AROUND), ids=str)
def test_wrappers_that_pass_updates_on_displace_nothing(name):
    assert "displaced" not in train(AROUND[name](optimizer()), AS_THEY_ARE)


@pytest.fixture
def _optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("simulated", "float32"),
        ("mesh", "bfloat16"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in ("simulated", "mesh", "alone")
            for dtype in ("bfloat16", "float16", "float32", "float64")
        ),
    ],
)
@pytest.mark.usefixtures("_optimizations")
def test_a_run_as_users_compile_it_displaces_nothing(kind, dtype):
    """With all of XLA's fusions, which may not round the sum otherwise."""
    mesh = None if kind == "alone" else helpers.mesh_of(kind, 2)
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
        params, tx = cd.replicas.replicate(params, mesh), optimizer(mesh)
        step = jax.jit(helpers.train_step(tx))
        state = params, tx.init(params)
        for _ in range(4):
            state, _ = step(state, jax.tree.map(jnp.sin, state[0]))
        report = metrics.read(state[1])
    assert report["steps"] == 4
    assert not {"displaced", "anchors_differ"} & set(report)


def test_replicas_that_are_alike_after_local_steps_are_reported():
    """Their gradients were averaged, or they were given the same batch."""
    tx, params = optimizer(k=3), cd.replicas.replicate(PARAMS, TWO)
    state, update = (params, tx.init(params)), jax.jit(helpers.train_step(tx))
    same = jax.tree.map(jnp.ones_like, params)
    state, _ = update(state, same)
    assert metrics.read(state[1])["alike"] is True
    for _ in range(2):  # as after a sync they should be
        state, _ = update(state, same)
    assert "alike" not in metrics.read(state[1])
    other = jax.tree.map(lambda x: x.at[1].mul(2), same)
    state, _ = update(state, other)
    assert "alike" not in metrics.read(state[1])


@pytest.mark.parametrize("changed", ["w", "b", "swapped"])
def test_any_array_that_is_changed_by_hand_is_noticed(changed):
    """Two that change places, too."""
    tx, params = optimizer(), cd.replicas.replicate({**PARAMS, "c": jnp.zeros(3)}, TWO)
    update = jax.jit(helpers.train_step(tx))
    gradients = jax.tree.map(jnp.ones_like, params)
    (params, state), _ = update((params, tx.init(params)), gradients)
    if changed == "swapped":
        params = {**params, "b": params["c"], "c": params["b"]}
    else:
        params = {**params, changed: params[changed].at[0].multiply(1.0001)}
    (_, state), _ = update((params, state), gradients)
    expected = [1, 1] if changed == "swapped" else [1, 0]
    assert metrics.read(state)["displaced"] == expected
