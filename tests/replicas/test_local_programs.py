"""The program of a local step, where the host knows that it is one."""

import helpers
import hlo
import jax
import optax
import pytest
from scheduled_optimizers import OPTIMIZERS, of_rows, placed, some, synced

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS, REPLICAS, STEPS = helpers.AXIS, 2, 9


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_local_step_is_a_program_without_collectives_and_conditions(name):
    tx = OPTIMIZERS[name]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    local = equations(step, state, batch, due=False)
    assert not [x for x in local if talks(x)]
    asking = equations(step, state, batch)
    # Muon and Dion have conditions of their own, by which they orthonormalise.
    assert conditions(local) < conditions(asking)
    assert [x for x in equations(step, state, batch, due=True) if talks(x)]


def equations(step, *arguments, **options):
    return list(helpers.equations(step.trace(*arguments, **options).jaxpr.jaxpr))


def conditions(found):
    return sum(x.primitive.name == "cond" for x in found)


def talks(equation):
    names = equation.params.get("axes", ()), equation.params.get("axis_name", ())
    silent = equation.primitive.name in ("axis_index", "pvary")
    return AXIS in jax.tree.leaves(names) and not silent


def test_the_compiled_local_step_sends_nothing():
    tx = OPTIMIZERS["local_muon"]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    text = step.lower(state, batch, due=False).compile().as_text()
    program = hlo.parse(text)
    assert not program.collectives([program.entry])
    assert not program.conditionals()
    assert "all-reduce" not in text


def test_what_is_traced_for_one_step_does_not_serve_another():
    """JAX keeps traces of a jitted function: which program it is goes with them."""
    tx = OPTIMIZERS["every_k"]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    train = jax.jit(of_rows(helpers.train_step(tx)))
    for _ in range(2):
        step, now = cd.replicas.step(train, mesh, donate=False), state
        for _ in range(3):
            now, _ = step(now, batch)
        assert now[1].metrics.syncs.tolist() == [1] * REPLICAS
        assert now[1].metrics.votes.tolist() == [0] * REPLICAS


@pytest.mark.parametrize("sync", [True, False])
def test_the_caller_may_say_what_the_step_is(sync):
    """In a loop of one's own, under `shard_map`."""
    tx = OPTIMIZERS["every_k"]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, due=sync)
        return (optax.apply_updates(params, updates), opt_state), {}

    step = jax.jit(helpers.in_shard_map(of_rows(train), mesh))
    assert any(map(talks, equations(step, state, batch))) == sync
    (_, opt_state), _ = step(state, batch)
    assert opt_state.metrics.syncs.tolist() == [sync] * REPLICAS
    assert opt_state.metrics.votes.tolist() == [0] * REPLICAS
    mapped = cd.replicas.step(of_rows(train), mesh, donate=False)
    helpers.assert_bitwise(mapped(state, batch)[0], step(state, batch)[0])


def test_a_sync_that_cannot_be_traced_fails_at_once():
    broken = synchronizers.reconcile()._replace(sync=lambda *_: 1 / 0)
    tx = synced(triggers.every_k(500), broken)
    mesh, state = placed(tx)
    with pytest.raises(ZeroDivisionError):
        helpers.replica_step(tx, mesh)(state, helpers.make_gradients(1, REPLICAS)[0])


def test_a_program_that_is_not_there_is_not_given():
    tx = synced(triggers.relative_momentum_change(0.1))
    mesh, state = placed(tx)
    step, (batch,) = helpers.replica_step(tx, mesh), helpers.make_gradients(1, REPLICAS)
    with pytest.raises(ValueError, match="known only of an optimizer whose trigger"):
        step.lower(state, batch, due=True)
