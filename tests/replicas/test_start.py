"""Replicas start from one model, which is the anchor's."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import curvadion_jax as cd
from curvadion_jax.replicas._start import check_start

REPLICAS = 4
TX = cd.adaptive_sync(
    optax.sgd(0.1), cd.triggers.every_k(2), cd.synchronizers.reconcile(), helpers.AXIS
)


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_the_context_of_another_mesh_is_rejected():
    """As of the mesh of the loop that was, which `jax.set_mesh` still has."""
    mesh, before = cd.replicas.make_mesh(2), jax.make_mesh((2,), ("data",))
    step = helpers.replica_step(TX, mesh)
    params = helpers.make_params()
    state = cd.replicas.replicate((params, TX.init(params)), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    with jax.set_mesh(before):
        for use in (
            lambda: step(state, batch),
            lambda: cd.replicas.replicate(params, mesh),
        ):
            with pytest.raises(
                ValueError,
                match=r"the mesh data=2 \(Explicit\), .* is replica=2 \(Auto\): give",
            ):
                use()
    with jax.set_mesh(mesh):
        state, _ = step(state, batch)
    assert state[1].metrics.local_steps.tolist() == [1, 1]


def step_of(tx=TX):
    return helpers.replica_step(tx, cd.replicas.make_mesh(REPLICAS))


def gradients():
    return helpers.make_gradients(1, REPLICAS)[0]


def test_a_seed_for_every_replica_is_rejected():
    """They would stay as far apart as they started, for ever."""
    models = [helpers.make_params(seed) for seed in range(REPLICAS)]
    state = stacked(*[(params, TX.init(params)) for params in models])
    with pytest.raises(ValueError, match=r"different parameters \('bias'\)"):
        step_of()(state, gradients())


def test_a_seed_for_every_replica_beside_one_anchor_is_rejected():
    models = [helpers.make_params(seed) for seed in range(REPLICAS)]
    opt_state = stacked(*[TX.init(models[0])] * REPLICAS)
    with pytest.raises(ValueError, match=r"\('bias'\) are not those"):
        step_of()((stacked(*models), opt_state), gradients())


def loaded():
    """A state whose parameters were loaded after init, as with a pretrained model."""
    state = TrainState.create(apply_fn=None, params=helpers.make_params(0), tx=TX)
    return state.replace(params=helpers.make_params(1))


def test_parameters_loaded_after_init_are_noticed_by_replicate():
    with pytest.raises(ValueError, match=r"not those that the optimizer was init"):
        cd.replicas.replicate(loaded(), cd.replicas.make_mesh(REPLICAS))


def test_parameters_loaded_after_replicate_are_noticed_by_the_first_step():
    state = helpers.start(TX, helpers.make_params(0), cd.replicas.make_mesh(REPLICAS))
    other = stacked(*[helpers.make_params(1)] * REPLICAS)
    with pytest.raises(ValueError, match=r"replicas\.reanchor\(state\)"):
        step_of()((other, state[1]), gradients())


def test_reanchor():
    """The first sync goes to the mean of where the replicas are now."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = cd.replicas.reanchor(loaded())
    helpers.assert_bitwise(state.opt_state.sync_state.anchor, state.params)
    state = cd.replicas.replicate(state, mesh)
    step = helpers.replica_step(TX, mesh)
    pair = (state.params, state.opt_state)
    zeros = jax.tree.map(np.zeros_like, gradients())
    for _ in range(2):
        pair, _ = step(pair, zeros)
    assert int(cd.metrics.read(pair[1])["syncs"]) == 1
    for name, x in helpers.make_params(1).items():
        helpers.assert_bitwise(pair[0][name][2], x)


def test_reanchor_forgets_what_is_owed_and_keeps_the_rest():
    tx = cd.local_muon(0.1, budget=0.5, axis_name=helpers.AXIS)
    *_, (params, opt_state) = helpers.run_vmap(
        tx, helpers.make_params(), helpers.make_gradients(4, REPLICAS)
    )
    assert any(np.any(x) for x in jax.tree.leaves(opt_state.sync_state.residual))
    _, after = cd.replicas.reanchor((params, opt_state))
    assert not any(np.any(x) for x in jax.tree.leaves(after.sync_state.residual))
    helpers.assert_bitwise(after.sync_state.anchor, params)
    helpers.assert_bitwise(after.sync_state.common, opt_state.sync_state.common)
    helpers.assert_bitwise(after.inner_state, opt_state.inner_state)
    helpers.assert_bitwise(after.metrics, opt_state.metrics)


@pytest.mark.parametrize("state", [{}, (helpers.make_params(), ())])
def test_reanchor_needs_parameters_and_an_anchor(state):
    with pytest.raises(ValueError, match="must hold an anchor, and beside it"):
        cd.replicas.reanchor(state)


def test_replicas_that_have_drifted_apart_go_on():
    """Only the start is looked at: a restored state is as it was between two syncs."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(TX, helpers.make_params(), mesh)
    state, _ = helpers.replica_step(TX, mesh)(state, gradients())
    assert float(cd.replicas.divergence(state[0])) > 0
    helpers.replica_step(TX, mesh)(state, gradients())


def test_without_an_anchor_a_seed_for_every_replica_is_warned_of():
    tx = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
    models = [helpers.make_params(seed) for seed in range(REPLICAS)]
    state = stacked(*[(params, tx.init(params)) for params in models])
    with pytest.warns(UserWarning, match=r"with different values \('0/bias'\)"):
        state, _ = step_of(tx)(state, gradients())
    assert float(cd.replicas.divergence(state[0])) > 0
    step_of(tx)(state, gradients())  # it has begun


class Averaged(TrainState):
    average: dict


def averaged(params, average, tx=TX):
    state = Averaged.create(
        apply_fn=None, params=helpers.make_params(0), average={}, tx=tx
    )
    return state.replace(params=params, average=average)


def test_beside_an_average_of_the_weights_the_parameters_are_known_by_name():
    mesh = cd.replicas.make_mesh(REPLICAS)
    one, other = helpers.make_params(0), helpers.make_params(1)
    cd.replicas.replicate(averaged(one, jax.tree.map(jnp.zeros_like, one)), mesh)
    with pytest.raises(ValueError, match=r"not those that the optimizer was init"):
        cd.replicas.replicate(averaged(other, one), mesh)
    state = cd.replicas.reanchor(averaged(other, one))
    helpers.assert_bitwise(state.opt_state.sync_state.anchor, other)
    helpers.assert_bitwise(state.average, one)
    cd.replicas.replicate(state, mesh)


def test_a_trace_in_front_of_the_optimizer_is_not_taken_for_the_parameters():
    tx, mesh = optax.chain(optax.trace(0.5), TX), cd.replicas.make_mesh(REPLICAS)
    one, other = helpers.make_params(0), helpers.make_params(1)
    cd.replicas.replicate((one, tx.init(one)), mesh)
    with pytest.raises(ValueError, match=r"not those that the optimizer was init"):
        cd.replicas.replicate((other, tx.init(one)), mesh)
    _, opt_state = cd.replicas.reanchor((other, tx.init(one)))
    helpers.assert_bitwise(opt_state[1].sync_state.anchor, other)
    cd.replicas.replicate(tx.init(one), mesh)
    with pytest.raises(ValueError, match="must hold an anchor, and beside it"):
        cd.replicas.reanchor(tx.init(one))


def test_parameters_may_be_called_like_a_field_of_optax():
    one, other = helpers.make_params(0), helpers.make_params(1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    with pytest.raises(ValueError, match="are not those that the optimizer was"):
        cd.replicas.replicate({"mu": other, "opt": TX.init(one)}, mesh)
    state = cd.replicas.reanchor({"mu": other, "opt": TX.init(one)})
    helpers.assert_bitwise(state["opt"].sync_state.anchor, other)


def test_the_parameters_are_those_nearest_to_the_optimizer():
    one, other = helpers.make_params(0), helpers.make_params(1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = {"params": one, "ema": {"params": other}, "opt_state": TX.init(one)}
    cd.replicas.replicate(state, mesh)
    state = cd.replicas.reanchor(state | {"params": other})
    helpers.assert_bitwise(state["opt_state"].sync_state.anchor, other)
    inner = {"model": other, "opt_state": TX.init(other)}
    state = {"params": one, "opt_state": TX.init(one), "disc": inner}
    cd.replicas.replicate(state, mesh)
    with pytest.raises(ValueError, match="call the parameters 'params'"):
        cd.replicas.reanchor(state)


def test_parameters_that_could_be_either_of_two_are_asked_for():
    one, other = helpers.make_params(0), helpers.make_params(1)
    with pytest.raises(ValueError, match=r"of \['0', '1'\] call the parameters 'par"):
        cd.replicas.reanchor((one, other, TX.init(one)))
    mesh = cd.replicas.make_mesh(REPLICAS)
    cd.replicas.replicate((other, one, TX.init(one)), mesh)
    with pytest.raises(ValueError, match=r"\('bias'\) are not those"):
        cd.replicas.replicate((other, other, TX.init(one)), mesh)


def test_a_part_of_the_state_alone_is_not_looked_at():
    mesh = cd.replicas.make_mesh(REPLICAS)
    kept = TX.init(helpers.make_params()).sync_state
    cd.replicas.replicate({"sync_state": kept, "w": helpers.make_params(1)}, mesh)


@pytest.mark.parametrize("anchored", [True, False])
def test_an_average_in_the_memory_of_the_host_is_compared_too(anchored):
    tx = TX if anchored else cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
    mesh, one = cd.replicas.make_mesh(REPLICAS), helpers.make_params()
    state = {"model": one, "average": one, "opt_state": tx.init(one)}
    state = cd.replicas.replicate(state, mesh)
    state["average"] = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")),
        state["average"],
    )
    check_start(state, has_axis=True)


def test_of_two_models_of_one_kind_each_optimizer_has_the_parameters_beside_it():
    models = [helpers.make_params(seed) for seed in range(2)]
    pairs = [{"params": x, "opt_state": TX.init(x)} for x in models]
    state = dict(zip("gd", pairs, strict=True))
    mesh = cd.replicas.make_mesh(REPLICAS)
    cd.replicas.replicate(state, mesh)
    swapped = {a: state[a] | {"params": state[b]["params"]} for a, b in ("gd", "dg")}
    with pytest.raises(ValueError, match="are not those that the optimizer was"):
        cd.replicas.replicate(swapped, mesh)
    state = cd.replicas.reanchor(swapped)
    for name, x in zip("gd", reversed(models), strict=True):
        helpers.assert_bitwise(state[name]["opt_state"].sync_state.anchor, x)


def test_each_of_two_optimizers_has_an_anchor_of_its_own():
    mesh = cd.replicas.make_mesh(REPLICAS)
    params = {"g": helpers.make_params(0), "d": {"w": jnp.ones((3, 3))}}
    states = {name: TX.init(each) for name, each in params.items()}
    cd.replicas.replicate((params, states), mesh)
    changed = params | {"d": {"w": jnp.zeros((3, 3))}}
    with pytest.raises(ValueError, match=r"\('w'\) are not those"):
        cd.replicas.replicate((changed, states), mesh)
    _, states = cd.replicas.reanchor((changed, states))
    for name, each in changed.items():
        helpers.assert_bitwise(states[name].sync_state.anchor, each)
