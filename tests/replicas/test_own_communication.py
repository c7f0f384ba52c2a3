"""What a training step sends beside the optimizer is named, and what hangs rejected."""

import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import curvadion_jax as cd

REPLICAS = 4
AXIS = helpers.AXIS
ELEMENTS = sum(int(np.prod(shape)) for shape in helpers.SHAPES.values())
TX = cd.local_muon(0.1, budget=0.5, axis_name=AXIS)


def averaged(gradients):
    return jax.tree.map(lambda g: lax.pmean(g, AXIS), gradients)


def with_decay(gradients, params):
    return jax.tree.map(lambda g, p: g + 0.1 * p, averaged(gradients), params)


def with_noise(gradients, params):
    del params
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS))
    return jax.tree.map(
        lambda g: g + 1e-3 * jax.random.normal(key, g.shape), averaged(gradients)
    )


def clipped(gradients, params):
    del params
    norm = lax.pmean(optax.tree.norm(gradients), AXIS)
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradients)


def permuted(gradients, params):
    del params
    ring = [(i, (i + 1) % REPLICAS) for i in range(REPLICAS)]
    return jax.tree.map(lambda g: g + lax.ppermute(g, AXIS, ring), gradients)


def without_a_gradient(gradients, params):
    """As of a contrastive step: zeros are no averaged gradient."""
    mixed = jax.tree.map(jnp.add, gradients, averaged(gradients))
    return mixed | {"embed": jnp.zeros_like(params["embed"])}


CASES = {
    "decay": (with_decay, "psum", 4 * ELEMENTS),
    "noise": (with_noise, "psum", 4 * ELEMENTS),
    "norm": (clipped, "psum", 4),
    "ring": (permuted, "ppermute", 4 * ELEMENTS),
    "contrastive": (without_a_gradient, "psum", 4 * ELEMENTS),
}


def step_of(function, tx=TX):
    """A training step whose gradients go through the function first."""

    def train(state, gradients):
        params, opt_state = state
        gradients = jax.tree.map(lambda g: g[0], gradients)
        given = function(gradients, params)
        updates, opt_state = tx.update(given, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    return cd.replicas.step(train, cd.replicas.make_mesh(REPLICAS), donate=False)


def arguments(tx=TX):
    mesh = cd.replicas.make_mesh(REPLICAS)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    return helpers.start(tx, helpers.make_params(), mesh), gradients


@pytest.mark.parametrize("name", CASES)
def test_it_is_counted_and_named_once(name):
    function, primitive, sent = CASES[name]
    step = step_of(function)
    message = f"step itself communicates .*{primitive}.* {sent} bytes"
    with pytest.warns(UserWarning, match=message) as found:
        step.lower(*arguments())
    assert len(found) == 1
    with warnings.catch_warnings(action="error"):
        step.lower(*arguments())


def gathered(gradients):
    return jax.tree.map(lambda g: lax.all_gather(g, AXIS).mean(0), gradients)


def in_a_loop(gradients):
    def body(total, gradient):
        return total + lax.psum(gradient, AXIS), ()

    def accumulated(g):
        return lax.scan(body, jnp.zeros(g.shape), g[None])[0]

    return jax.tree.map(accumulated, gradients)


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("function", [averaged, gathered, in_a_loop])
@pytest.mark.filterwarnings("ignore:The training step itself communicates")
def test_averaged_gradients_are_rejected(function, injected):
    tx = TX
    if injected:
        build = lambda rate: cd.local_muon(rate, axis_name=AXIS)  # noqa: E731
        tx = optax.inject_hyperparams(build)(0.1)
    step = step_of(lambda gradients, params: function(gradients), tx)
    with pytest.raises(ValueError, match="was already averaged over"):
        step.lower(*arguments(tx))


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        cd.curvadion(0.1, axis_name=AXIS),
        cd.presets.diloco(0.1, 2, axis_name=AXIS),
        # A condition around the inner optimizer is fine.
        cd.adaptive_sync(
            optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3),
            cd.triggers.every_k(2),
            cd.synchronizers.reconcile(),
            AXIS,
        ),
    ],
)
def test_the_optimizers_own_is_not_named(tx):
    with warnings.catch_warnings(action="error"):
        step_of(lambda gradients, params: gradients, tx).lower(*arguments(tx))


@pytest.mark.parametrize("kind", ["spike", "number", "while"])
def test_a_condition_around_the_optimizer_is_rejected(kind):
    """As where a step is skipped on a spike of the replica's own loss."""

    def train(state, gradients):
        params, opt_state = state
        gradients = jax.tree.map(lambda g: g[0], gradients)

        def update(opt_state):
            return TX.update(gradients, opt_state, params)

        def skip(opt_state):
            return optax.tree.zeros_like(gradients), opt_state

        if kind == "while":
            several = lambda i, carry: TX.update(gradients, carry[1], params)  # noqa: E731
            count = 1 + (optax.tree.norm(gradients) > 1).astype(int)
            updates, opt_state = lax.fori_loop(0, count, several, skip(opt_state))
        else:
            norm, number = optax.tree.norm(gradients), lax.axis_index(AXIS)
            spike = norm > 1e3 if kind == "spike" else number == 0
            updates, opt_state = lax.cond(spike, skip, update, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {}

    step = cd.replicas.step(train, cd.replicas.make_mesh(REPLICAS))
    with pytest.raises(ValueError, match=r"inside a lax.cond or while_loop"):
        step(*arguments())


def test_models_under_vmap_are_rejected():
    """Several decisions at once run both branches: each step would send all."""

    def train(state, gradients):
        params, opt_state = state
        gradients = jax.tree.map(lambda g: g[0], gradients)
        updates, opt_state = jax.vmap(TX.update)(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    models = 3
    mesh = cd.replicas.make_mesh(REPLICAS)
    params = helpers.make_params()
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * models), tree)  # noqa: E731
    state = cd.replicas.replicate(stack((params, TX.init(params))), mesh)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    batch = jax.tree.map(lambda g: np.stack([g] * models, 1), gradients)
    with pytest.raises(ValueError, match="under vmap, for 3 models"):
        cd.replicas.step(train, mesh)(state, batch)


def test_one_replica_under_vmap_is_an_ensemble():
    """Nothing is sent, and nothing is wrong."""
    tx = cd.local_muon(0.1, budget=0.5)
    params = jax.tree.map(lambda x: jnp.stack([x] * 2), helpers.make_params())
    state = jax.vmap(tx.init)(params)
    _, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    assert cd.metrics.observe(state).steps.tolist() == [1, 1]
