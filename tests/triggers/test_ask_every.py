"""Replicas that decide on every k-th step, and say nothing on the others."""

from typing import Any

import chex
import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import weighted_runs

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

AXIS = helpers.AXIS


def optimizer(trigger, ask_every=None, axis_name: str | None = AXIS) -> Any:
    return cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        trigger,
        synchronizers.reconcile(),
        axis_name,
        ask_every=ask_every,
    )


def train_step(tx):
    """A step of one replica whose batch is its gradients, given its number."""

    def train(state, gradients, step):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, step=step)
        return (optax.apply_updates(params, updates), opt_state), ()

    return train


def mesh_step(tx, mesh):
    train = train_step(tx)

    def local(state, gradients, step):
        return train(state, jax.tree.map(lambda g: g[0], gradients), step)

    return cd.replicas.step(local, mesh, donate=False)


def run(tx, gradients, first=0):
    """(Parameters, optimizer state) after each step."""
    mesh = cd.replicas.make_mesh(helpers.replicas_of(gradients))
    state = helpers.start(tx, helpers.make_params(), mesh)
    step = helpers.quick(mesh_step(tx, mesh), state, gradients[0], np.int32(first))
    for number, tree in enumerate(gradients, start=first):
        state, _ = step(state, tree, np.int32(number))
        yield jax.device_get(state)


def requesting():
    """Replica i requests a sync where the first element of its gradient is positive."""

    def decide(seen: Any):
        first = seen.gradients["bias"][0]
        return triggers.decision(first > 0, first, 0)

    return triggers.stateless(decide)


def gradients_of(requests):
    gradients = helpers.make_gradients(len(requests), len(requests[0]))
    for tree, row in zip(gradients, requests, strict=True):
        tree["bias"][:, 0] = row
    return gradients


#                   asked         asked         asked         asked
REQUESTS = np.array([0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0]) - 0.5


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_sync_that_is_forced_waits_for_no_question(fragments):
    tx = cd.adaptive_sync(
        optax.sgd(0.1),
        triggers.every_k(100),
        synchronizers.reconcile(fragments=fragments, momentum=False),
        AXIS,
        ask_every=3,
    )
    state, step = weighted_runs.start(tx, 2), weighted_runs.train_on(tx, 2, sync=True)
    for tree in helpers.make_gradients(4, 2):
        state = step(state, tree, np.ones(2, np.float32))
        assert state[1].metrics.synced.all()


@pytest.mark.parametrize("replica", [0, 2])
def test_a_request_is_met_when_replicas_are_next_asked(replica):
    requests = np.full((len(REQUESTS), 3), -1.0)
    requests[:, replica] = REQUESTS
    history = list(run(optimizer(requesting(), 3), gradients_of(requests)))
    # Steps 0, 3, 6, 9: that of 2 at 3; those of 5 and 6 at 6, and 9 its own.
    expected = [number in (3, 6, 9) for number in range(12)]
    assert helpers.decisions(history) == expected
    asked = [int(state.metrics.asked[0]) for _, state in history]
    assert asked == [1 + number // 3 for number in range(12)]
    values = np.stack([state.metrics.value for _, state in history])
    np.testing.assert_array_equal(values, np.float32(requests))


def test_the_number_of_the_step_counts_and_not_the_state():
    history = list(run(optimizer(triggers.always(), 4), gradients_of([[0.0]] * 6), 7))
    # Numbers 7 to 12.
    assert helpers.decisions(history) == [False, True, False, False, False, True]


def test_bytes_are_those_of_the_steps_that_were_asked():
    gradients = gradients_of([[0.0, 0.0]] * 8)
    (*_, (_, state)) = run(optimizer(triggers.every_k(8), 3), gradients)
    read = metrics.read(state)
    assert (read["steps"], read["syncs"], read["asked"]) == (8, 0, 3)
    assert read["bytes"] == 3 * 4


@pytest.mark.parametrize(
    "trigger",
    [
        triggers.every_k(6),
        pytest.param(triggers.budget(0.5), marks=pytest.mark.slow),
    ],
)
def test_asking_on_every_step_is_asking_always(trigger):
    gradients = helpers.make_gradients(8, 2)
    tx = optimizer(trigger)
    expected = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    found = list(run(optimizer(trigger, 1), gradients))
    assert helpers.decisions(found) == helpers.decisions(expected)
    assert any(helpers.decisions(found))
    # Two programs of the same arithmetic, over eight steps.
    for (params, _), (others, _) in zip(found, expected, strict=True):
        chex.assert_trees_all_close(params, others, rtol=1e-6, atol=1e-6)


def test_vmap_simulates_it():
    tx = optimizer(requesting(), 2)
    requests = [[0, 0], [0, 1], [0, 0], [1, 0], [0, 0], [0, 0]]
    gradients = gradients_of(requests)
    state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (2, *jnp.shape(x))),
        (helpers.make_params(), tx.init(helpers.make_params())),
    )
    mapped = jax.vmap(train_step(tx), in_axes=(0, 0, None), axis_name=AXIS)
    step = helpers.quick(jax.jit(mapped), state, gradients[0], np.int32(0))
    history = []
    for number, tree in enumerate(gradients):
        state, _ = step(state, tree, np.int32(number))
        history.append(jax.device_get(state))
    assert helpers.decisions(history) == [False, False, True, False, True, False]


def test_one_replica_is_asked_as_often():
    tx = optimizer(triggers.every_k(2), 3, axis_name=None)
    params = helpers.make_params()
    state = tx.init(params)
    step = jax.jit(lambda state, number: tx.update(params, state, params, step=number))
    synced = []
    for number in range(7):
        _, state = step(state, number)
        synced.append(bool(state.metrics.synced))
    assert synced == [False, False, False, True, False, False, True]


@pytest.fixture(scope="module")
def program():
    mesh, tx = cd.replicas.make_mesh(8), optimizer(triggers.every_k(5), 10)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 8)
    lowered = mesh_step(tx, mesh).lower(state, batch, np.int32(0))
    return hlo.parse(lowered.compile().as_text())


def test_nothing_at_all_is_sent_on_a_step_that_is_not_asked(program):
    assert program.collectives([program.entry], branches=False) == []
    branches = [
        [program.collectives([branch]) for branch in x.called]
        for x in program.conditionals()
    ]
    flag, sync = sorted(branches, key=lambda pair: sum(x.bytes for x in pair[1]))
    assert [(x.opcode, x.shape) for x in flag[1]] == [("all-reduce", "s32[]")]
    assert sync[1]
    assert flag[0] == sync[0] == []


def traced(tx, step):
    """Traces an update on one of two replicas, with a step made from its state."""
    helpers.trace(lambda p, s, g: tx.update(g, s, p, step=step(s)), tx)


@pytest.mark.parametrize("name", ["steps", "local_steps"])
def test_a_counter_of_the_state_is_rejected(name):
    tx = optimizer(triggers.always(), 2)
    with pytest.raises(
        ValueError, match=r"step differs .* train\(state, batch, step\)"
    ):
        traced(tx, lambda state: getattr(state.metrics, name))
    traced(tx, lambda state: 3)  # the same on all replicas


def test_one_replica_needs_the_step_too():
    tx, params = optimizer(triggers.always(), 2, None), helpers.make_params()
    state = tx.init(params)
    with pytest.raises(ValueError, match="needs the number of the step"):
        tx.update(params, state, params)


def test_the_step_is_not_passed_on():
    seen = []

    def update(updates, state, params=None, **extra_args):
        del params
        seen.append(set(extra_args))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx: Any = cd.adaptive_sync(
        inner, triggers.never(), synchronizers.average_gradients()
    )
    params = helpers.make_params()
    tx.update(params, tx.init(params), params, step=3, value=1.0)
    assert seen
    assert all("value" in names and "step" not in names for names in seen)
