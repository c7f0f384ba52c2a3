"""Where counters alone say when a sync is due, the host knows and nobody is asked."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scheduled_optimizers import OPTIMIZERS, of_rows, placed, some, synced

import curvadion_jax as cd
from curvadion_jax import _schedule, triggers

AXIS, REPLICAS, STEPS = helpers.AXIS, 2, 9


def run(step, state, gradients):
    """The states after each step."""
    found = []
    for batch in gradients:
        state, _ = step(state, batch)
        found.append(jax.device_get(state))
    return found


def without_the_flag(state):
    """The state without what counts that replicas asked each other."""
    counters = state[1].metrics
    flag = 4 * counters.asked.astype(np.int32)
    sent = counters.sent.copy()
    sent[:, 0, 1] -= flag
    counters = counters._replace(asked=np.zeros_like(counters.asked), sent=sent)
    return state[0], state[1]._replace(metrics=counters)


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_the_result_is_that_of_the_program_with_a_condition(name):
    tx = OPTIMIZERS[name]()
    mesh, state = placed(tx)
    gradients = helpers.make_gradients(STEPS, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    known = run(step, state, gradients)
    asked = run(jax.jit(lambda state, batch: step(state, batch)), state, gradients)
    counted = [s[1].metrics.asked[0] for s in known]
    syncs = [s[1].metrics.syncs[0] for s in known]
    # Which fragments a sync is of only the replicas know.
    assert counted == (syncs if name == "fragments" else [0] * STEPS)
    assert [s[1].metrics.asked[0] for s in asked] == list(range(1, STEPS + 1))
    assert 0 < syncs[-1] < STEPS or name in ("always", "never", "synchronous_dion")
    for a, b in zip(known, asked, strict=True):
        helpers.assert_bitwise(without_the_flag(a), without_the_flag(b))


def test_another_state_is_looked_at():
    """Two runs that take turns, and one that begins again, in one compiled step."""
    tx = OPTIMIZERS["every_k"]()
    mesh, start = placed(tx)
    gradients = helpers.make_gradients(1, REPLICAS)[0]
    step = helpers.replica_step(tx, mesh)
    one, two, synced = start, step(start, gradients)[0], []
    for _ in range(6):
        one, two = step(one, gradients)[0], step(two, gradients)[0]
        synced.append([int(x[1].metrics.synced[0]) for x in (one, two)])
    assert synced == [[0, 0], [0, 1], [1, 0], [0, 0], [0, 1], [1, 0]]
    again = jax.device_put(jax.device_get(start), start[0]["bias"].sharding)
    assert [
        int((again := step(again, gradients)[0])[1].metrics.synced[0]) for _ in range(3)
    ] == [0, 0, 1]


def asked_and_synced(train, mesh, state):
    """After four steps."""
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = cd.replicas.step(of_rows(train), mesh, donate=False)
    for _ in range(4):
        state, _ = step(state, batch)
    is_counters = lambda x: isinstance(x, cd.SyncMetrics)  # noqa: E731
    found = filter(is_counters, jax.tree.leaves(state, is_leaf=is_counters))
    return {(int(x.asked[0]), int(x.syncs[0])) for x in found}


def test_counters_of_ones_own_are_not_the_optimizers():
    tx = OPTIMIZERS["every_k"]()

    def train(states, batch):
        state, own = states
        new, metrics = helpers.train_step(tx)(state, batch)
        return (new, {"metrics": {"steps": own["metrics"]["steps"] + 1}}), metrics

    mesh, state = placed(tx)
    own = jax.device_put(np.zeros(REPLICAS, "i"), state[1].metrics.steps.sharding)
    state = (state, {"metrics": {"steps": own}})
    ((asked, syncs),) = asked_and_synced(train, mesh, state)
    assert asked == 0
    assert syncs


def test_a_signal_is_asked_for():
    tx = synced(triggers.at_least_every(triggers.relative_momentum_change(1e3), 3))
    # The first step has no value to compare with, and synchronises.
    assert asked_and_synced(helpers.train_step(tx), *placed(tx)) == {(4, 2)}


def test_a_budget_that_is_traced_is_asked_for():
    make = optax.inject_hyperparams(
        lambda rate: synced(triggers.evenly(rate, cost=1.0))
    )
    tx = make(rate=0.5)
    assert asked_and_synced(helpers.train_step(tx), *placed(tx)) == {(4, 2)}


def test_two_optimizers_in_a_step_are_asked():
    tx = OPTIMIZERS["every_k"]()

    def train(states, batch):
        step = helpers.train_step(tx)
        return tuple(step(state, batch)[0] for state in states), {}

    mesh, state = placed(tx)
    assert asked_and_synced(train, mesh, (state, state)) == {(4, 1)}


def test_what_is_averaged_with_a_schedule():
    tx = synced(triggers.every_k(2))

    def train(state, batch):
        inner, others = state
        new, metrics = helpers.train_step(tx)(inner, batch)
        return (new, {"means": others["means"] + batch["bias"]}), metrics

    mesh, state = placed(tx)
    place = state[0]["bias"].sharding
    state = (state, {"means": jax.device_put(np.zeros((REPLICAS, 5), "f"), place)})
    step = cd.replicas.step(of_rows(train), mesh, average=("means",), donate=False)
    gradients = helpers.make_gradients(2, REPLICAS)
    state, _ = step(state, gradients[0])
    means = np.asarray(state[1]["means"])
    np.testing.assert_array_equal(means, gradients[0]["bias"])
    state, _ = step(state, gradients[1])
    means = np.asarray(state[1]["means"])
    np.testing.assert_array_equal(means[0], means[1])


def test_many_steps_are_looked_ahead_more_than_once():
    """Longer than what is worked out at once."""
    tx = synced(triggers.quadratic_period(optax.linear_schedule(0.3, 0.1, 150), 0.7))
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    asked = jax.jit(lambda state, batch: step(state, batch))
    a = b = state
    for _ in range(150):
        a, b = step(a, batch)[0], asked(b, batch)[0]
    assert a[1].metrics.syncs[0] > 10
    helpers.assert_bitwise(
        without_the_flag(jax.device_get(a)), without_the_flag(jax.device_get(b))
    )


def test_a_step_that_is_thrown_away_is_not_counted():
    """Loss scaling, say: the host cannot count along, and the replicas are asked."""
    tx = OPTIMIZERS["every_k"]()

    def train(state, batch, keep):
        new, metrics = of_rows(helpers.train_step(tx))(state, batch)
        return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state), metrics

    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step, synced = cd.replicas.step(train, mesh, donate=False), []
    for keep in (True, False, True, True, True):
        state, _ = step(state, batch, keep)
        synced.append(int(state[1].metrics.synced[0]))
    assert synced == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_counters_are_read_once(replicas, monkeypatch):
    read, times = _schedule.Upcoming._read, []
    monkeypatch.setattr(
        _schedule.Upcoming, "_read", lambda *x: times.append(1) or read(*x)
    )
    tx, mesh = OPTIMIZERS["every_k"](), cd.replicas.make_mesh(replicas, {"fsdp": 2})
    state = cd.replicas.replicate(
        (helpers.make_params(), tx.init(helpers.make_params())), mesh
    )
    (batch,) = helpers.make_gradients(1, replicas)
    step = helpers.replica_step(tx, mesh)
    with jax.set_mesh(mesh):
        for _ in range(4):
            state, _ = step(state, batch)
    assert state[1].metrics.syncs.tolist() == [1] * replicas
    assert len(times) == 1
    counters = state[1].metrics
    later = counters._replace(local_steps=counters.local_steps + 1)
    step((state[0], state[1]._replace(metrics=later)), batch)
    assert len(times) == 2


def test_a_trigger_state_keeps_its_dtype():
    def decide(seen, count):
        due = count >= 2
        return triggers.decision(due), jnp.where(due, 0, count + jnp.float32(1))

    trigger = triggers.Trigger(lambda *_: jnp.zeros([], jnp.int32), decide, True)
    assert asked_and_synced(helpers.train_step(tx := synced(trigger)), *placed(tx)) == {
        (0, 1)
    }


def test_a_state_of_numpy_arrays_goes_on():
    tx = synced(triggers.every_k(3))
    mesh, state = placed(tx)
    step = helpers.replica_step(tx, mesh)
    for number, gradients in enumerate(helpers.make_gradients(6, REPLICAS)):
        if number == 2:
            state = jax.device_get(state)
        state, _ = step(state, gradients)
        metrics = cd.metrics.observe(state)
        assert metrics.synced.tolist() == [number % 3 == 2] * REPLICAS
