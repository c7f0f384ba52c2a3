"""Replicas start from one model, which is the anchor's."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import curvadion_jax as cd

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
    with pytest.raises(ValueError, match="beside one anchor of theirs"):
        cd.replicas.reanchor(state)


def test_replicas_that_have_drifted_apart_go_on():
    """Only the start is looked at: a restored state is as it was between two syncs."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(TX, helpers.make_params(), mesh)
    state, _ = helpers.replica_step(TX, mesh)(state, gradients())
    assert float(cd.replicas.divergence(state[0])) > 0
    helpers.replica_step(TX, mesh)(state, gradients())


def test_optimizers_without_an_anchor_are_not_looked_at():
    tx = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
    models = [helpers.make_params(seed) for seed in range(REPLICAS)]
    state = stacked(*[(params, tx.init(params)) for params in models])
    step_of(tx)(state, gradients())
