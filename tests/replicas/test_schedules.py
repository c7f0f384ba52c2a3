"""Where counters alone say when a sync is due, the host knows and nobody is asked."""

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import _schedule, synchronizers, triggers

AXIS, REPLICAS, STEPS = helpers.AXIS, 2, 9
DECAY = optax.linear_schedule(0.3, 0.1, STEPS)


def synced(trigger, synchronizer=None, **options):
    synchronizer = synchronizer or synchronizers.reconcile(momentum=False)
    inner = optax.sgd(0.1, 0.9)
    return cd.adaptive_sync(inner, trigger, synchronizer, AXIS, **options)


OPTIMIZERS = {
    "every_k": lambda: synced(triggers.every_k(3)),
    "always": lambda: synced(triggers.always()),
    "never": lambda: synced(triggers.never()),
    "evenly": lambda: synced(triggers.evenly(0.3, cost=1.0)),
    "quadratic": lambda: synced(triggers.quadratic_period(DECAY, 0.4)),
    "combined": lambda: synced(
        triggers.any_of(
            triggers.after_steps(triggers.delayed(triggers.every_k(5)), 2),
            triggers.at_most_every(triggers.at_least_every(triggers.never(), 3), 2),
        )
    ),
    "gradients": lambda: synced(triggers.every_k(3), synchronizers.average_gradients()),
    "fragments": lambda: synced(
        triggers.every_k(2), synchronizers.reconcile(fragments=2)
    ),
    "local_muon": lambda: cd.local_muon(0.1, budget=0.2, axis_name=AXIS),
    "rising momentum": lambda: cd.local_muon(
        0.1, budget=0.2, axis_name=AXIS, momentum=optax.linear_schedule(0.8, 0.95, 9)
    ),
    "diloco": lambda: cd.presets.diloco(0.1, 3, axis_name=AXIS),
    "muloco": lambda: cd.presets.muloco(0.1, 3, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.1, 3, axis_name=AXIS),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, axis_name=AXIS),
}
QUICK = ("every_k", "fragments", "local_muon", "combined")


def some(names):
    return [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in names
    ]


def placed(tx):
    mesh = cd.replicas.make_mesh(REPLICAS)
    return mesh, helpers.start(tx, helpers.make_params(), mesh)


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


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_a_local_step_is_a_program_without_collectives_and_conditions(name):
    tx = OPTIMIZERS[name]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    local = equations(step, state, batch, sync=False)
    assert not [x for x in local if talks(x)]
    asking = equations(step, state, batch)
    # Muon and Dion have conditions of their own, by which they orthonormalise.
    assert conditions(local) < conditions(asking)
    assert [x for x in equations(step, state, batch, sync=True) if talks(x)]


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
    text = step.lower(state, batch, sync=False).compile().as_text()
    program = hlo.parse(text)
    assert not program.collectives([program.entry])
    assert not program.conditionals()
    assert "all-reduce" not in text


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
        assert now[1].metrics.asked.tolist() == [0] * REPLICAS


def of_rows(train):
    """The step for gradients [replicas, ...], of which a replica has one row."""
    return lambda state, batch: train(state, jax.tree.map(lambda g: g[0], batch))


def asked_and_synced(train, mesh, state):
    """After four steps."""
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = cd.replicas.step(of_rows(train), mesh, donate=False)
    for _ in range(4):
        state, _ = step(state, batch)
    is_counters = lambda x: isinstance(x, cd.SyncMetrics)  # noqa: E731
    found = filter(is_counters, jax.tree.leaves(state, is_leaf=is_counters))
    return {(int(x.asked[0]), int(x.syncs[0])) for x in found}


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


@pytest.mark.parametrize("sync", [True, False])
def test_the_caller_may_say_what_the_step_is(sync):
    """In a loop of one's own, under `shard_map`."""
    tx = OPTIMIZERS["every_k"]()
    mesh, state = placed(tx)
    (batch,) = helpers.make_gradients(1, REPLICAS)

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, sync=sync)
        return (optax.apply_updates(params, updates), opt_state), {}

    step = jax.jit(helpers.in_shard_map(of_rows(train), mesh))
    assert any(map(talks, equations(step, state, batch))) == sync
    (_, opt_state), _ = step(state, batch)
    assert opt_state.metrics.syncs.tolist() == [sync] * REPLICAS
    assert opt_state.metrics.asked.tolist() == [0] * REPLICAS
    mapped = cd.replicas.step(of_rows(train), mesh, donate=False)
    helpers.assert_bitwise(mapped(state, batch)[0], step(state, batch)[0])


@pytest.mark.parametrize("sync", [1, "yes", jnp.array(True)])
def test_what_is_said_is_a_bool(sync):
    params = helpers.make_params()
    tx = cd.presets.local_sgd(0.1, 2)
    with pytest.raises(TypeError, match="sync must be True or False"):
        tx.update(params, tx.init(params), params, sync=sync)


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


def test_a_sync_that_cannot_be_traced_fails_at_once():
    broken = synchronizers.reconcile()._replace(sync=lambda *_: 1 / 0)
    tx = synced(triggers.every_k(500), broken)
    mesh, state = placed(tx)
    with pytest.raises(ZeroDivisionError):
        helpers.replica_step(tx, mesh)(state, helpers.make_gradients(1, REPLICAS)[0])


def test_a_trigger_state_keeps_its_dtype():
    def decide(seen, count):
        due = count >= 2
        return triggers.decision(due), jnp.where(due, 0, count + jnp.float32(1))

    trigger = triggers.Trigger(lambda *_: jnp.zeros([], jnp.int32), decide, True)
    assert asked_and_synced(helpers.train_step(tx := synced(trigger)), *placed(tx)) == {
        (0, 1)
    }


def test_a_program_that_is_not_there_is_not_given():
    tx = synced(triggers.relative_momentum_change(0.1))
    mesh, state = placed(tx)
    step, (batch,) = helpers.replica_step(tx, mesh), helpers.make_gradients(1, REPLICAS)
    with pytest.raises(ValueError, match="known only of an optimizer whose trigger"):
        step.lower(state, batch, sync=True)


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
