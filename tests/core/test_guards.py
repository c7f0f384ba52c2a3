"""What would communicate unnoticed, or hang, is rejected when the program is traced."""

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _collectives, _guards, synchronizers, triggers

AXIS = helpers.AXIS
REPLICAS = 2
MESH = cd.replicas.make_mesh(REPLICAS)
SYNCHRONIZERS = {
    "average_gradients": synchronizers.average_gradients,
    "average_factors": synchronizers.average_factors,
    "reconcile": synchronizers.reconcile,
}


def sgd(synchronizer=None, trigger=None, **options):
    return cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        trigger or triggers.every_k(2),
        synchronizer or synchronizers.reconcile(),
        AXIS,
        **options,
    )


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(sgd(), id="adaptive_sync"),
        pytest.param(cd.curvadion(0.1, axis_name=AXIS), id="curvadion"),
        pytest.param(cd.local_muon(0.1, axis_name=AXIS), id="local_muon"),
        pytest.param(
            cd.presets.synchronous_dion(0.1, axis_name=AXIS), id="synchronous_dion"
        ),
    ],
)
@pytest.mark.parametrize("leaf", ["every", "tall", "bias"])
@pytest.mark.filterwarnings("ignore:the training step itself communicates")
def test_averaged_gradients_are_rejected(tx, leaf):
    def step(params, opt_state, gradients):
        reduced = {
            name: lax.pmean(g, AXIS) if leaf in ("every", name) else g
            for name, g in gradients.items()
        }
        return tx.update(reduced, opt_state, params)

    name = "bias|tall|embed" if leaf == "every" else leaf
    with pytest.raises(ValueError, match=rf"({name}).*through a pmean or psum: remove"):
        helpers.trace(step, tx)


def test_gradients_that_the_parameters_type_sums_are_rejected():
    tx = sgd()

    def body(params, opt_state, gradients):
        opt_state, gradients = jax.tree.map(lambda x: x[0], (opt_state, gradients))
        loss = lambda p: sum(  # noqa: E731
            jnp.vdot(p[name], g) for name, g in gradients.items()
        )
        updates, _ = tx.update(jax.grad(loss)(params), opt_state, params)
        return updates

    params = helpers.make_params()
    opt_state = cd.replicas.replicate(tx.init(params), MESH)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    specs = (P(), P(AXIS), P(AXIS))
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match=r"use curvadion_jax\.replicas\.replicate and"):
        jax.eval_shape(mapped, params, opt_state, gradients)


def test_an_averaged_loss_in_a_step_is_named():
    """Gradients there are a replica's own by construction."""
    tx = sgd()

    def step(params, opt_state, gradients):
        def loss(p):
            value = sum(jnp.vdot(p[name], g) for name, g in gradients.items())
            return lax.pmean(value, AXIS)

        return tx.update(jax.grad(loss)(params), opt_state, params)

    with pytest.warns(UserWarning, match=r"communicates .*psum of float32\[\].*losses"):
        helpers.trace(step, tx)


def unchecked_run(tx, gradients):
    """Steps in the user's own shard_map with check_vma=False."""
    train = helpers.train_step(tx)

    def body(state, batch):
        state, batch = jax.tree.map(lambda x: x[0], (state, batch))
        return jax.tree.map(lambda x: x[None], train(state, batch)[0])

    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    state = helpers.start(tx, helpers.make_params(), MESH)
    step = helpers.quick(jax.jit(mapped), state, gradients[0])
    for tree in gradients:
        state = step(state, tree)
    return jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize("reducing", ["reconcile"])
def test_unchecked_shard_map_with_the_word_is_the_same(reducing):
    gradients = helpers.make_gradients(3, REPLICAS)
    tx = sgd(SYNCHRONIZERS[reducing](), allow_unchecked=True)
    expected = helpers.last(helpers.run_mesh(tx, helpers.make_params(), gradients))
    helpers.assert_bitwise(unchecked_run(tx, gradients), expected)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("predicate", ["local", "reduced"])
def test_the_guarded_cond_rejects_a_decision_of_one_replica(predicate, number):
    def step(params, opt_state, gradients):
        x = gradients["bias"]
        decision = (x.sum() > 0).astype(jnp.int32)
        if predicate == "reduced":
            decision = _collectives.largest(decision, AXIS)
        mean, same = lambda x: lax.pmean(x, AXIS), lambda x: x
        syncs = [mean] * number
        return _guards.switch(decision, same, syncs, x, axis_name=AXIS), ()

    if predicate == "reduced":
        helpers.trace(step, sgd(), manual=True)
        # It is no optimizer that sends this.
        with pytest.warns(UserWarning, match="pmax of int32.*psum of float32"):
            helpers.trace(step, sgd())
        return
    with pytest.raises(ValueError, match="Reduce it over the axis first"):
        helpers.trace(step, sgd(), manual=True)


@pytest.mark.parametrize("name", SYNCHRONIZERS)
def test_a_local_decision_around_a_collective_is_rejected(name):
    # `apply_if_finite` decides for each replica. Around collectives (the factors,
    # averaged inside of it) the replicas with finite gradients would wait for ever.
    inner = optax.apply_if_finite(cd.dion(0.1), 3)
    tx = cd.adaptive_sync(inner, triggers.every_k(2), SYNCHRONIZERS[name](), AXIS)
    matrices = {k: helpers.make_params()[k] for k in helpers.MATRICES}
    if name != "average_factors":
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx, matrices)
        return
    with pytest.raises(ValueError, match="differs between the replicas"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx, matrices)


def test_a_local_loop_around_a_collective_is_rejected():
    # As many Dion steps as the replica's own gradients ask for.
    dion = cd.scale_by_dion()

    def update(updates, state, params=None, **extra_args):
        times = (updates["tall"][0, 0] > 0).astype(jnp.int32)
        nothing = jax.tree.map(lambda g: 0 * g, updates)

        def again(_, carry):
            result = dion.update(updates, carry[1], params, **extra_args)
            return _collectives.vary(result, AXIS)

        return lax.fori_loop(0, times, again, (nothing, state))

    inner = optax.GradientTransformationExtraArgs(dion.init, update)
    tx = cd.adaptive_sync(
        inner, triggers.every_k(2), synchronizers.average_factors(), AXIS
    )
    matrices = {k: helpers.make_params()[k] for k in helpers.MATRICES}
    with pytest.raises(ValueError, match="differs between the replicas"):
        helpers.trace(lambda p, o, g: tx.update(g, o, p), tx, matrices)


def test_several_models_under_one_vmap_are_rejected():
    """With several decisions both branches would run on every step."""
    tx, params = sgd(), {"w": jnp.ones((3, 4))}
    state = jax.vmap(tx.init)(params)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (params, state))
    models = jax.vmap(jax.vmap(lambda p, s: tx.update(p, s, p)), axis_name=AXIS)
    with pytest.raises(ValueError, match="under vmap, for 3 models"):
        jax.eval_shape(models, *stacked)
