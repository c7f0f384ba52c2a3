"""What would communicate unnoticed, or hang, is rejected when the program is traced."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _collectives, compressors, synchronizers, triggers
from curvadion_jax.synchronizers import SyncState

AXIS = helpers.AXIS
REPLICAS = 2
MESH = cd.replicas.make_mesh(REPLICAS)
SYNCHRONIZERS = {
    "average_gradients": synchronizers.average_gradients,
    "average_factors": synchronizers.average_factors,
    "reconcile": synchronizers.reconcile,
}


def vary(x):
    return _collectives.vary(x, AXIS)


def optimizer(inner=None, synchronizer=None, trigger=None, **options) -> Any:
    return cd.adaptive_sync(
        optax.sgd(0.1, 0.9) if inner is None else inner,
        trigger or triggers.every_k(2),
        synchronizer or synchronizers.reconcile(),
        AXIS,
        **options,
    )


def traced(tx, params=None, change=lambda gradients: gradients):
    helpers.trace(lambda p, o, g: tx.update(change(g), o, p), tx, params)


def communicating(function):
    """An optimizer that reduces gradients itself."""

    def update(updates, state, params=None):
        del params
        sent = function(updates["bias"][:2])
        return {**updates, "bias": updates["bias"].at[:2].set(sent)}, state

    return optax.GradientTransformation(optax.identity().init, update)


def asking(seen):
    norm = lax.pmax(optax.tree.norm(seen.gradients), AXIS)
    return triggers.decision(norm > 1, norm)


def mean(x):
    return lax.pmean(x, AXIS)


# What finds them is tried in test_jax_internals.
LOCAL = {
    "inner": optimizer(communicating(mean)),
    "deep": optimizer(communicating(jax.jit(jax.checkpoint(jax.jit(mean))))),
    **{
        f"synchronised-{name}": optimizer(
            cd.presets.synchronous_dion(0.1, axis_name=AXIS), SYNCHRONIZERS[name]()
        )
        for name in ("average_gradients", "reconcile")
    },
    "trigger": optimizer(trigger=triggers.stateless(asking)),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_part_that_communicates_is_rejected(name):
    with pytest.raises(ValueError, match="A local step would communicate"):
        traced(LOCAL[name])


def test_collectives_within_a_replica_pass():
    mesh = cd.replicas.make_mesh(2, {"part": 2})
    tx = optimizer(communicating(lambda x: lax.pmean(x, "part")))
    params = {"bias": jnp.ones(5)}

    def body(*stacked):
        state, params, gradients = jax.tree.map(lambda x: x[0, 0], stacked)
        updates, _ = tx.update(gradients, state, params)
        return updates["bias"][None, None]

    stacked = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (2, 2, *x.shape)), (tx.init(params), params)
    )
    specs = P(AXIS, "part")
    both = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)
    jax.eval_shape(both, *stacked, stacked[1])


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optimizer(), id="adaptive_sync"),
        pytest.param(cd.curvadion(0.1, axis_name=AXIS), id="curvadion"),
        pytest.param(cd.local_muon(0.1, axis_name=AXIS), id="local_muon"),
        pytest.param(
            cd.presets.synchronous_dion(0.1, axis_name=AXIS), id="synchronous_dion"
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The training step itself communicates")
def test_averaged_gradients_are_rejected(tx):
    with pytest.raises(ValueError, match=r"was already averaged over"):
        traced(tx, change=lambda gradients: lax.pmean(gradients, AXIS))


def test_gradients_that_the_parameters_type_sums_are_rejected():
    tx = optimizer()

    def body(params, opt_state, gradients):
        opt_state, gradients = jax.tree.map(lambda x: x[0], (opt_state, gradients))
        loss = lambda p: sum(jnp.vdot(p[name], g) for name, g in gradients.items())
        updates, _ = tx.update(jax.grad(loss)(params), opt_state, params)
        return updates

    params = helpers.make_params()
    opt_state = cd.replicas.replicate(tx.init(params), MESH)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    specs = (P(), P(AXIS), P(AXIS))
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match=r"replicated \(in_specs=P\(\)\): use curva"):
        jax.eval_shape(mapped, params, opt_state, gradients)


def unchecked(tx):
    """A step in the user's own `shard_map` with check_vma=False."""
    train = helpers.train_step(tx)

    def body(state, batch):
        state, batch = jax.tree.map(lambda x: x[0], (state, batch))
        return jax.tree.map(lambda x: x[None], train(state, batch)[0])

    return jax.shard_map(
        body, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )


@pytest.mark.slow
def test_an_unchecked_shard_map_takes_the_word_and_is_the_same():
    gradients = helpers.make_gradients(3, REPLICAS)
    tx = optimizer(allow_unchecked=True)
    expected = helpers.last(helpers.run_mesh(tx, helpers.make_params(), gradients))
    state = helpers.start(tx, helpers.make_params(), MESH)
    with pytest.raises(ValueError, match="pass allow_unchecked=True"):
        jax.eval_shape(unchecked(optimizer()), state, gradients[0])
    step = helpers.quick(jax.jit(unchecked(tx)), state, gradients[0])
    for tree in gradients:
        state = step(state, tree)
    helpers.assert_bitwise(jax.device_get(state), expected)


def looping():
    """As many Dion steps as the replica's own gradients ask for."""
    dion = cd.scale_by_dion()

    def update(updates, state, params=None, **extra_args):
        times = (updates["tall"][0, 0] > 0).astype(jnp.int32)
        nothing = jax.tree.map(lambda g: 0 * g, updates)

        def again(_, carry):
            return vary(dion.update(updates, carry[1], params, **extra_args))

        return lax.fori_loop(0, times, again, (nothing, state))

    return optax.GradientTransformationExtraArgs(dion.init, update)


@pytest.mark.parametrize("name", SYNCHRONIZERS)
@pytest.mark.parametrize(
    "inner", [optax.apply_if_finite(cd.dion(0.1), 3), looping()], ids=["cond", "loop"]
)
def test_a_local_decision_around_a_collective_is_rejected(inner, name):
    """Where factors are averaged inside of it some replicas would wait for ever."""
    tx = optimizer(inner, SYNCHRONIZERS[name]())
    matrices = {k: helpers.make_params()[k] for k in helpers.MATRICES}
    if name != "average_factors":
        traced(tx, matrices)
        return
    with pytest.raises(ValueError, match="replicas may decide differently"):
        traced(tx, matrices)


@pytest.mark.parametrize("after_local_step", [False, True])
def test_a_synchronizer_that_waits_for_some_replicas_is_rejected(after_local_step):
    def sync(local, state, group):
        large = local.params["bias"][0] > 0
        state = lax.cond(large, lambda x: group.mean(x), vary, vary(state))
        return local.params, local.inner_state, state

    waiting = synchronizers.Synchronizer(
        lambda params, inner_state, views: SyncState(residual=jnp.zeros(2)),
        sync,
        lambda *_: compressors.Payload(),
        after_local_step=after_local_step,
    )
    with pytest.raises(ValueError, match="replicas may decide differently"):
        traced(optimizer(synchronizer=waiting))


def test_updates_and_states_may_be_the_same_on_all_replicas():
    """As of a parameter that is frozen by hand, or of a state made in the step."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    frozen = optax.stateless(lambda updates, params: jax.tree.map(zeros, updates))
    eight_bits = synchronizers.reconcile(compressor=compressors.quantize(8))
    for inner in (frozen, optax.sgd(0.1, 0.9)):
        tx = optimizer(inner, eight_bits)
        helpers.trace(lambda p, _, g, tx=tx: tx.update(g, tx.init(p), p), tx)


def test_models_under_vmap_are_rejected_in_a_shard_map_too():
    tx = optimizer(synchronizer=synchronizers.average_gradients())
    several = optax.GradientTransformation(jax.vmap(tx.init), jax.vmap(tx.update))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), helpers.make_params())
    with pytest.raises(ValueError, match="under vmap, for 3 models"):
        helpers.trace(
            lambda params, state, gradients: several.update(gradients, state, params),
            several,
            stacked,
            manual=True,
        )
