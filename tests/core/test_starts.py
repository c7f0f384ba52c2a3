"""What replicas may begin with: equal parameters, and no copies of them."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}
every_kind = pytest.mark.parametrize("kind", ["simulated", "mesh"])


def optimizer(inner, mesh) -> Any:
    trigger, synchronizer = triggers.every_k(2), synchronizers.reconcile()
    return cd.adaptive_sync(inner, trigger, synchronizer, mesh)


def with_master(inner):
    """Parameters of few bits, with a copy of them in float32."""

    def init(params):
        master = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return master, inner.init(master)

    def update(gradients, state, params):
        updates, inner_state = inner.update(gradients, state[1], state[0])
        master = optax.apply_updates(state[0], updates)
        less = lambda m, p: m.astype(p.dtype) - p
        return jax.tree.map(less, master, params), (master, inner_state)

    return optax.GradientTransformation(init, update)


def jitted(inner):
    return optax.GradientTransformation(jax.jit(inner.init), inner.update)


def moved_together(inner):
    """Several arrays go through one operation."""
    init = lambda params: inner.init(jax.lax.optimization_barrier(params))
    return optax.GradientTransformation(init, inner.update)


def finite(inner):
    clean = lambda x: jnp.where(jnp.isfinite(x), x, 0)
    init = lambda params: inner.init(jax.tree.map(clean, params))
    return optax.GradientTransformation(init, inner.update)


def stacked(inner):
    """With a copy of the state in another shape."""

    def init(params):
        state = inner.init(params)
        return state, jax.tree.map(lambda x: jnp.stack([x, x]), state)

    def update(updates, state, params):
        updates, new = inner.update(updates, state[0], params)
        return updates, (new, jax.tree.map(lambda x: jnp.stack([x, x]), new))

    return optax.GradientTransformation(init, update)


COPIES = {
    "master weights": with_master(optax.sgd(0.1)),
    "master weights, jit": jitted(with_master(optax.sgd(0.1))),
    "master weights, flat": optax.flatten(with_master(optax.sgd(0.1))),
    "master weights, copied together": moved_together(with_master(optax.sgd(0.1))),
    "master weights, stacked": stacked(with_master(optax.sgd(0.1))),
    "master weights of finite numbers": finite(with_master(optax.sgd(0.1))),
    "schedule-free": optax.contrib.schedule_free_sgd(0.1),
    "SAM": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
}
STARTS = {
    "float32": PARAMS,
    "bfloat16": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS),
    "zeros": jax.tree.map(jnp.zeros_like, PARAMS),
    "number": {"scale": jnp.ones([])},
}


@every_kind
@pytest.mark.parametrize("name", ["w", "b"])
def test_parameters_that_differ_are_refused(kind, name):
    mesh = helpers.mesh_of(kind, 2)
    rows = cd.replicas.replicate(PARAMS, mesh)
    rows[name] = rows[name].at[1].add(1)
    with pytest.raises(ValueError, match=r"parameters differ.*replicas\.replicate"):
        optimizer(optax.sgd(0.1), mesh).init(rows)


@every_kind
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("params", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("name", COPIES)
def test_an_inner_optimizer_that_copies_a_parameter_is_refused(
    kind, wrap, params, name
):
    mesh = helpers.mesh_of(kind, 2)
    init = wrap(optimizer(COPIES[name], mesh).init)
    with pytest.raises(ValueError, match=r"is a copy of a parameter.*leave the copy"):
        init(cd.replicas.replicate(params, mesh))


@pytest.mark.parametrize(
    "inner",
    [optax.adam(0.1), optax.sgd(0.1, 0.9), optax.MultiSteps(optax.sgd(0.1), 2)],
)
def test_states_like_parameters_are_no_copies(inner):
    """Zeros, where a parameter is zero or one too."""
    mesh = cd.replicas.simulated(2)
    optimizer(inner, mesh).init(cd.replicas.replicate(PARAMS, mesh))
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    optimizer(optax.rmsprop(0.1, initial_scale=1.0), mesh).init(
        cd.replicas.replicate(ones, mesh)
    )


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.prodigy(0.1),
        optax.contrib.dog(0.1),
        optax.contrib.dowg(0.1),
        optax.contrib.cocob(0.1),
    ],
    ids=["prodigy", "dog", "dowg", "cocob"],
)
def test_where_a_run_began_is_no_copy(inner):
    """It does not move by local steps either."""
    mesh = cd.replicas.simulated(2)
    optimizer(inner, mesh).init(cd.replicas.replicate(PARAMS, mesh))


@pytest.mark.parametrize(
    "function", [jnp.sign, jnp.isfinite, jnp.abs, lambda x: x.astype(bool)]
)
def test_what_is_computed_of_parameters_is_no_copy(function):
    init = lambda params: jax.tree.map(function, params)
    update = lambda updates, state, params=None: (updates, init(params))
    mesh = cd.replicas.simulated(2)
    optimizer(optax.GradientTransformation(init, update), mesh).init(
        cd.replicas.replicate(PARAMS, mesh)
    )


def test_one_replica_may_keep_a_copy():
    """It never moves by a sync of others."""
    optimizer(COPIES["master weights"], None).init(PARAMS)


def test_rows_are_needed():
    mesh = cd.replicas.simulated(3)
    tx = optimizer(optax.sgd(0.1), mesh)
    with pytest.raises(ValueError, match=r"'b'.*\(2, 3\).*replicas\.replicate"):
        tx.init({"b": jnp.zeros((2, 3))} | {"a": jnp.zeros((3, 1))})
    for given in (jnp.zeros([]), jnp.zeros(2)):
        with pytest.raises(ValueError, match="a row for each of 3 replicas"):
            tx.init({"x": given})


ONE = cd.replicas.simulated(2)
WITHOUT = {
    "optimizer": cd.local_muon(0.1),
    "lifted": cd.replicas.lift(optax.adam(0.1), None),
    "simulated": cd.local_muon(0.1, mesh=ONE),
    "lifted, simulated": cd.replicas.lift(optax.adam(0.1), ONE),
}


@pytest.mark.parametrize("tx", WITHOUT.values(), ids=WITHOUT)
def test_rows_on_devices_need_a_mesh_of_devices(tx):
    """Or one replica would be trained, or rows gathered on every step."""
    rows = cd.replicas.replicate({"w": jnp.ones((4, 8))}, cd.replicas.make_mesh(2))
    with pytest.raises(ValueError, match=r"\['w'\] has a row on the devices of each"):
        tx.init(rows)


@every_kind
def test_replicas_that_begin_apart_under_jit_meet_at_the_first_sync(kind):
    """Values are not known there; all of them take the first one's as the anchor."""
    mesh = helpers.mesh_of(kind, 2)
    rows = cd.replicas.replicate(PARAMS, mesh)
    rows["b"] = rows["b"].at[1].add(1)
    tx = optimizer(optax.sgd(0.1), mesh)
    state = jax.jit(tx.init)(rows)
    np.testing.assert_array_equal(state.common.anchor["b"], PARAMS["b"])
    for _ in range(2):
        zeros = jax.tree.map(jnp.zeros_like, rows)
        updates, state = jax.jit(tx.update)(zeros, state, rows)
        rows = optax.apply_updates(rows, updates)
    np.testing.assert_allclose(rows["b"], np.full((2, 3), 0.5))
    assert "anchors_differ" not in cd.metrics.read(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: optax.tree.set(state, learning_rate=0.01),
        lambda state: cd.replicas.resize(state, cd.replicas.simulated(4)),
    ],
    ids=["a common number", "another number of rows"],
)
def test_a_state_needs_rows(change):
    tx = optimizer(optax.inject_hyperparams(optax.sgd)(0.1), ONE)
    rows = cd.replicas.replicate(PARAMS, ONE)
    state = change(tx.init(rows))
    with pytest.raises(ValueError, match=r"^State.*needs a row for each of 2 replicas"):
        tx.update(rows, state, rows)


def test_extra_arguments_are_no_rows():
    """Every replica would be given the losses of all."""
    mesh = cd.replicas.make_mesh(2)
    tx = optimizer(optax.polyak_sgd(), mesh)
    rows = cd.replicas.replicate(PARAMS, mesh)
    losses = cd.replicas.split(jnp.ones(2), mesh)
    with pytest.raises(
        ValueError, match=r"'value' has a row for each.*the mean of a loss"
    ):
        tx.update(rows, tx.init(rows), rows, value=losses)
