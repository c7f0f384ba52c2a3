"""What a step does wrong with replicas is named, and what is right is not."""

import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd

AXIS = helpers.AXIS


def local_muon(learning_rate):
    trigger = cd.triggers.every_k(2)
    return cd.local_muon(learning_rate, trigger=trigger, axis_name=AXIS)


def silently(train, state, *arguments, replicas=2, **options):
    """The state after a step, of which nothing is said."""
    mesh = cd.replicas.make_mesh(replicas)
    step = cd.replicas.step(train, mesh, **options)
    with warnings.catch_warnings(action="error"):
        return step(cd.replicas.replicate(state, mesh), *arguments)[0]


def taken(tx, state, gradient):
    updates, opt_state = tx.update(gradient, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt_state}


GRADIENTS = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


@pytest.mark.parametrize("wrap", [jax.jit, jax.remat, lambda f: f])
def test_nothing_is_said_of_what_stays_the_same_on_all_replicas(wrap):
    """A frozen array, a schedule's value, and means of parameters after a sync."""
    tx = optax.inject_hyperparams(local_muon)(optax.linear_schedule(1, 0, 9))
    w = jnp.ones((8, 8))
    start = {"w": w, "opt": tx.init(w), "frozen": w, "heat": 1.0, "ema": w}

    @wrap
    def train(state, batch):
        new = taken(tx, state, batch)
        ema = 0.9 * state["ema"] + 0.1 * new["w"]
        frozen, heat = state["frozen"] + jnp.zeros(8)[None], 0.9 * state["heat"]
        return new | {"frozen": frozen, "heat": heat, "ema": ema}, {}

    silently(train, start, GRADIENTS)


def test_a_network_that_learns_from_another_is_named():
    """It reads parameters that a sync reaches, and is not reached by one."""
    tx, other = local_muon(0.02), optax.adam(0.1)
    w = jnp.ones((8, 8))

    def train(state, batch):
        new = taken(tx, state["generator"], batch)
        loss = lambda w: jnp.sum((batch @ w @ new["w"]) ** 2)  # noqa: E731
        gradient = jax.grad(loss)(state["critic"])
        updates, opt = other.update(gradient, state["opt"])
        critic = optax.apply_updates(state["critic"], updates)
        return {"generator": new, "critic": critic, "opt": opt}, {}

    state = {"generator": {"w": w, "opt": tx.init(w)}, "critic": w}
    with pytest.raises(UserWarning, match=r"of the state 3 arrays .*critic"):
        silently(train, state | {"opt": other.init(w)}, GRADIENTS)


def test_averages_are_taken_at_a_sync_of_any_optimizer():
    """The second of two updates a call, and of the second of two optimizers."""
    often, seldom = local_muon(0.02), cd.local_muon(0.1, budget=0.001, axis_name=AXIS)
    w = jnp.ones((8, 8))

    def train(state, batch):
        for _ in range(3):  # syncs on the second of three
            state = state | {"often": taken(often, state["often"], batch)}
        state = state | {"seldom": taken(seldom, state["seldom"], batch)}
        return state | {"mean": batch.mean()}, {}

    state = {
        "seldom": {"w": w, "opt": seldom.init(w)},
        "often": {"w": w, "opt": often.init(w)},
        "mean": 0.0,
    }
    after = silently(train, state, GRADIENTS, average=["mean"])
    assert after["often"]["opt"].metrics.syncs.tolist() == [1, 1]
    assert not after["often"]["opt"].metrics.synced.any()
    assert after["mean"][0] == after["mean"][1]


def test_a_condition_on_the_replicas_number_is_rejected():
    tx, w = local_muon(0.02), jnp.ones((8, 8))

    def train(state, batch):
        first = lax.axis_index(AXIS) == 0
        return lax.cond(first, lambda: taken(tx, state, batch), lambda: state), {}

    with pytest.raises(ValueError, match="condition or a while loop that a replica"):
        silently(train, {"w": w, "opt": tx.init(w)}, GRADIENTS)


def test_a_step_may_return_another_structure():
    tx, w = local_muon(0.02), jnp.ones((8, 8))

    def train(state, batch):
        return {"a": 1.0} | taken(tx, state, batch), {}

    silently(train, {"w": w, "opt": tx.init(w), "gone": 1.0}, GRADIENTS)


@pytest.mark.parametrize("wrong", ["step", "pmean"])
def test_injected_hyperparameters_hide_no_wrong_use(wrong):
    build = lambda learning_rate: cd.local_muon(  # noqa: E731
        learning_rate, axis_name=AXIS, ask_every=2
    )
    tx, w = optax.inject_hyperparams(build)(0.1), jnp.ones((8, 8))

    def train(state, batch, number):
        if wrong == "pmean":
            batch = lax.pmean(batch, AXIS)
        else:
            number = number + lax.axis_index(AXIS)
        updates, opt = tx.update(batch, state["opt"], state["w"], step=number)
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}

    message = {"step": "the step differs", "pmean": "a gradient is the same"}[wrong]
    with pytest.raises(ValueError, match=message):
        silently(train, {"w": w, "opt": tx.init(w)}, GRADIENTS, 0)


def test_numbers_among_the_extra_arguments_stay_numbers():
    tx, w = local_muon(0.02), jnp.ones((8, 8))

    def train(state, batch):
        updates, opt = tx.update(batch, state["opt"], state["w"], weight=-1.0)
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}

    with pytest.raises(ValueError, match="weight"):
        silently(train, {"w": w, "opt": tx.init(w)}, GRADIENTS)


def test_compiling_is_logged_once_for_each_program(caplog):
    tx = local_muon(0.02)
    mesh = cd.replicas.make_mesh(2, devices=jax.devices()[:2])
    state = {"w": jnp.ones((8, 8))}
    state = cd.replicas.replicate(state | {"opt": tx.init(state["w"])}, mesh)
    step = cd.replicas.step(lambda state, x: (taken(tx, state, x), {}), mesh)
    with caplog.at_level("INFO", logger="curvadion_jax"):
        for _ in range(4):
            state, _ = step(state, GRADIENTS)
    said = [record.message for record in caplog.records]
    assert [x[: x.index(")") + 1] for x in said] == [
        f"{word} <lambda> ({kind} step)"
        for kind in ("local", "sync")
        for word in ("compiling", "compiled")
    ]
