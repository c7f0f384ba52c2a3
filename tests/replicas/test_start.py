"""Replicas start from one model, which is the anchor's."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import curvadion_jax as cd

REPLICAS = 4
TX = cd.adaptive_sync(
    optax.sgd(0.1), cd.triggers.every_k(2), cd.synchronizers.reconcile(), helpers.AXIS
)
NO_ANCHOR = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
APART = r"start from different values \('model/bias'\)"
MOVED = r"The parameters \('bias'\) are not those given to tx.init"


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def gradients():
    return helpers.make_gradients(1, REPLICAS)[0]


def train(tx, wrap=lambda f: f):
    """A step on state with an average of the weights, beside which they are known."""

    @wrap
    def step(state, batch):
        batch = jax.tree.map(lambda g: g[0], batch)
        params, opt_state = state["model"], state["opt_state"]
        updates, opt_state = tx.update(batch, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"model": params, "opt_state": opt_state, "average": average}, {}

    mesh = cd.replicas.make_mesh(REPLICAS)
    return cd.replicas.step(step, mesh, average=["average"], donate=False)


def start(tx, initialised, params):
    """For each replica parameters, and an optimizer that began with others."""
    average = jax.tree.map(jnp.zeros_like, params[0])
    return stacked(
        *[
            {"model": x, "opt_state": tx.init(y), "average": average}
            for x, y in zip(params, initialised, strict=True)
        ]
    )


MODELS = [helpers.make_params(seed) for seed in range(REPLICAS)]
SAME, OTHER = [MODELS[0]] * REPLICAS, [MODELS[1]] * REPLICAS


@pytest.mark.parametrize(
    ("tx", "initialised", "params", "message"),
    [
        (TX, SAME, SAME, None),
        (TX, MODELS, MODELS, APART),
        (TX, SAME, MODELS, APART),
        (TX, SAME, OTHER, MOVED),
        (NO_ANCHOR, SAME, OTHER, None),
        (NO_ANCHOR, MODELS, MODELS, APART),
    ],
    ids=["one", "seeds", "loaded apart", "loaded", "loaded, no anchor", "seeds, none"],
)
def test_the_first_step_rejects_another_model(tx, initialised, params, message):
    state = start(tx, initialised, params)
    if message is None:
        state, _ = train(tx)(state, gradients())
        train(tx)(state, gradients())  # it has begun, and replicas may be apart
        return
    with pytest.raises(ValueError, match=message):
        train(tx)(state, gradients())


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_whatever_stands_around_the_update(wrap):
    with pytest.raises(ValueError, match=MOVED):
        train(TX, wrap)(start(TX, SAME, OTHER), gradients())


def test_an_nnx_model_that_was_loaded_after_the_optimizer():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    model.kernel[...] += 1
    graph, state = nnx.split((model, optimizer))
    mesh = cd.replicas.make_mesh(REPLICAS)

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {}

    step, x = cd.replicas.step(step, mesh), np.ones((REPLICAS, 3), np.float32)
    with pytest.raises(ValueError, match=r"'kernel'\) are not those"):
        step(cd.replicas.replicate(state, mesh), x)
    state[1]["opt_state"] = cd.replicas.reanchor(state[0], state[1]["opt_state"])
    state, _ = step(cd.replicas.replicate(state, mesh), x)
    anchor = cd.replicas.anchor(nnx.merge(graph, state)[1].opt_state)
    helpers.assert_bitwise(anchor["kernel"], model.kernel)


def test_each_of_two_optimizers_has_an_anchor_of_its_own():
    params = {"g": MODELS[0], "d": {"w": jnp.ones((3, 3))}}
    states = {name: TX.init(each) for name, each in params.items()}
    mesh = cd.replicas.make_mesh(REPLICAS)

    def train_both(state, batch):
        params, states = state
        done = {
            k: TX.update(jax.tree.map(jnp.ones_like, params[k]), states[k], params[k])
            for k in params
        }
        params = {k: optax.apply_updates(params[k], done[k][0]) for k in params}
        return (params, {k: done[k][1] for k in params}), batch

    step, batch = cd.replicas.step(train_both, mesh), np.ones(REPLICAS)
    step(cd.replicas.replicate((params, states), mesh), batch)
    changed = params | {"d": {"w": jnp.zeros((3, 3))}}
    step = cd.replicas.step(train_both, mesh)
    with pytest.raises(ValueError, match=r"'w'\) are not those"):
        step(cd.replicas.replicate((changed, states), mesh), batch)


def test_reanchor():
    """The first sync then keeps the parameters that were loaded."""
    state = TrainState.create(apply_fn=None, params=MODELS[0], tx=TX)
    state = state.replace(params=MODELS[1])
    opt_state = cd.replicas.reanchor(state.params, state.opt_state)
    helpers.assert_bitwise(opt_state.sync_state.anchor, MODELS[1])
    mesh = cd.replicas.make_mesh(REPLICAS)
    pair = cd.replicas.replicate((state.params, opt_state), mesh)
    step, zeros = (
        helpers.replica_step(TX, mesh),
        jax.tree.map(np.zeros_like, gradients()),
    )
    for _ in range(2):
        pair, _ = step(pair, zeros)
    assert int(cd.metrics.read(pair[1])["syncs"]) == 1
    helpers.assert_bitwise(pair[0], stacked(*OTHER))


def test_reanchor_drops_residuals_and_keeps_the_rest():
    tx = cd.local_muon(0.1, budget=0.5, axis_name=helpers.AXIS)
    *_, (params, opt_state) = helpers.run_vmap(
        tx, helpers.make_params(), helpers.make_gradients(4, REPLICAS)
    )
    assert any(np.any(x) for x in jax.tree.leaves(opt_state.sync_state.residual))
    with pytest.raises(ValueError, match="differ between the replicas"):
        cd.replicas.reanchor(params, opt_state)
    same = stacked(*OTHER)
    after = cd.replicas.reanchor(same, opt_state)
    assert not any(np.any(x) for x in jax.tree.leaves(after.sync_state.residual))
    helpers.assert_bitwise(after.sync_state.anchor, same)
    helpers.assert_bitwise(after.sync_state.common, opt_state.sync_state.common)
    helpers.assert_bitwise(after.inner_state, opt_state.inner_state)
    helpers.assert_bitwise(after.metrics, opt_state.metrics)


@pytest.mark.parametrize(
    ("params", "opt_state", "message"),
    [
        (MODELS[0], NO_ANCHOR.init(MODELS[0]), "holds no anchor"),
        (
            {"bias": jnp.ones(5)},
            TX.init(MODELS[0]),
            r"'embed' has shape \(7, 3\), .* is missing",
        ),
        (stacked(*SAME), TX.init(MODELS[0]), r"is \(4, 5\)"),
    ],
)
def test_reanchor_needs_the_anchor_of_these_parameters(params, opt_state, message):
    with pytest.raises(ValueError, match=message):
        cd.replicas.reanchor(params, opt_state)


def test_a_state_that_was_not_replicated_is_named():
    """Its step is a Python int, as `TrainState.create` makes it."""
    mesh = cd.replicas.make_mesh(2)
    tx = cd.local_muon(0.1, axis_name="replica")
    params = {"kernel": jnp.ones((8, 4))}
    state = {"step": 0, "params": params, "opt_state": tx.init(params)}
    step = cd.replicas.step(lambda state, batch: (state, {}), mesh)
    with pytest.raises(ValueError, match=r"needs a leading axis of 2 replicas\. Give"):
        step(state, {"x": jnp.ones((4, 1))})
