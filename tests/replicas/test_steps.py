"""Several steps in one program are the same steps, and syncs hide behind them."""

from typing import Any

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS, REPLICAS = helpers.AXIS, 2
# Roundings of numbers up to 16: XLA joins a multiplication and an addition in one
# program, and not in the other. Measured: 2e-6.
ROUNDING = 2e-5


def optimizer(trigger, **options) -> Any:
    synchronizer = synchronizers.reconcile(
        optax.sgd(0.7, 0.6, nesterov=True), momentum=False, **options
    )
    return cd.adaptive_sync(optax.sgd(0.3, 0.9), trigger, synchronizer, AXIS)


def several(tx, mesh, **options):
    """`helpers.replica_step` of several steps, each batch [replicas, ...] gradients."""
    train = helpers.train_step(tx)

    def local(state, gradients):
        return train(state, jax.tree.map(lambda g: g[0], gradients))

    return cd.replicas.steps(local, mesh, **{"donate": False, **options})


def stacked(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def compared(tx, number, steps):
    """States after as many steps, one at a time and several at once."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    one = many = helpers.start(tx, helpers.make_params(), mesh)
    gradients = helpers.make_gradients(steps, REPLICAS)
    step, run = helpers.replica_step(tx, mesh), several(tx, mesh)
    updates = []
    for tree in gradients:
        one, found = step(one, tree)
        updates.append(found)
    for first in range(0, steps, number):
        many, found = run(many, stacked(gradients[first : first + number]))
        for index, each in enumerate(updates[first : first + number]):
            at = jax.tree.map(lambda x, i=index: x[i], found)
            jax.tree.map(close, at, each)
    return jax.device_get(one), jax.device_get(many), run


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("number", "trigger", "options"),
    [
        pytest.param(3, triggers.every_k(3), {"delay": 3}, id="a period"),
        pytest.param(
            4,
            triggers.every_k(3),
            {"delay": 2, "compressor": compressors.quantize(4), "fragments": 2},
            id="across periods",
            marks=pytest.mark.slow,
        ),
        pytest.param(6, triggers.every_k(3), {}, id="no delay", marks=pytest.mark.slow),
        pytest.param(3, triggers.drift(0.5), {}, id="signal", marks=pytest.mark.slow),
    ],
)
def test_several_steps_are_the_same_steps(number, trigger, options):
    one, many, _ = compared(optimizer(trigger, **options), number, 12)
    assert 0 < one[1].metrics.syncs[0]
    jax.tree.map(close, one, many)
    assert one[1].metrics.sent.tolist() == many[1].metrics.sent.tolist()


def test_one_program_does_for_a_period(caplog):
    with caplog.at_level("INFO", "curvadion_jax"):
        *_, run = compared(optimizer(triggers.every_k(4), delay=4), 4, 12)
    told = [
        x.getMessage() for x in caplog.records if "compiling local" in x.getMessage()
    ]
    told = [text for text in told if "4 steps" in text]
    # The first window has no sync that ends in it.
    assert len(told) == 2
    assert all("4 steps, sync 4" in text for text in told)
    assert run.sent_outside == 0


@pytest.mark.parametrize(
    ("form", "name", "loops"),
    [
        pytest.param(None, "all-reduce", 0, id="exact"),
        pytest.param(compressors.quantize(2), "all-to-all", 0, id="first half"),
        pytest.param(compressors.quantize(2), "all-gather", 1, id="second half"),
    ],
)
def test_what_is_sent_depends_on_none_of_the_steps_behind_which_it_hides(
    form, name, loops
):
    """Of 8 steps: one, loops of 3 and 3, and the one on which the sync ends."""
    tx = optimizer(triggers.every_k(8), delay=8, compressor=form)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    batch = stacked(helpers.make_gradients(8, REPLICAS))
    lowered = several(tx, mesh).lower(state, batch, begins=[7], ends=[7])
    program = hlo.parse(lowered.compile().as_text() or "")
    entry = program.computations[program.entry]
    found = {x.name: x for x in entry}
    steps = [x for x in entry if x.opcode == "while"]
    assert len(steps) == 2
    assert not program.conditionals()
    sent = [x for x in entry if x.opcode.startswith(name)]
    if name == "all-gather":  # the weights cross in front of it
        sent = [x for x in sent if "u8" in x.shape]
    assert sent
    for each in sent:
        behind = reached(found, each.name)
        assert sum(x.name in behind for x in steps) == loops


def reached(found, name):
    """What an instruction of the entry computation is computed from."""
    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in found and name not in seen:
            seen.add(name)
            waiting += found[name].operands
    return seen


def test_what_is_injected_hides_too():
    synchronizer = synchronizers.reconcile(
        momentum=False, delay=8, compressor=compressors.quantize(2)
    )

    def make(rate):
        trigger = triggers.every_k(8)
        return cd.adaptive_sync(optax.sgd(rate), trigger, synchronizer, AXIS)

    tx = optax.inject_hyperparams(make)(rate=0.1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    batch = stacked(helpers.make_gradients(8, REPLICAS))
    text = several(tx, mesh).lower(state, batch, begins=[7], ends=[7]).compile()
    program = hlo.parse(text.as_text() or "")
    found = {x.name: x for x in program.computations[program.entry]}
    sent = [x for x in found.values() if x.opcode.startswith("all-gather")]
    halves = [
        sum(found[name].opcode == "while" for name in reached(found, x.name))
        for x in sent
        if "u8" in x.shape
    ]
    assert halves == [1]


def test_nothing_crosses_in_the_loops():
    tx = optimizer(triggers.every_k(8), delay=8)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    batch = stacked(helpers.make_gradients(8, REPLICAS))
    run = several(tx, mesh)
    lowered = run.lower(state, batch, begins=[7], ends=[])
    program = hlo.parse(lowered.compile().as_text() or "")
    assert not program.collectives([program.entry])
    with_end = run.lower(state, batch, begins=[], ends=[7])
    program = hlo.parse(with_end.compile().as_text() or "")
    loops = [x for x in program.computations[program.entry] if x.opcode == "while"]
    assert not program.collectives([name for x in loops for name in x.called])
    assert program.collectives([program.entry])


def test_shared_arguments_are_of_a_step_each():
    def count(state, batch, step):
        return state + step * batch.sum(), {"step": step}

    mesh = cd.replicas.make_mesh(1)
    state = cd.replicas.replicate(jnp.float32(0), mesh)
    state, found = cd.replicas.steps(count, mesh)(
        state, jnp.ones((3, 1)), jnp.arange(3)
    )
    assert (state.tolist(), found["step"].tolist()) == ([3], [[0], [1], [2]])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        pytest.param({}, r"need one leading axis of steps", id="none"),
        pytest.param({"a": np.ones((2, 1)), "b": np.ones((3, 1))}, "got {", id="two"),
        pytest.param(np.ones(()), "stack the batches", id="scalar"),
        pytest.param(np.ones((3,)), "cannot be divided over 1 replicas", id="no rows"),
    ],
)
def test_batches_that_are_none_are_refused(batches, message):
    mesh = cd.replicas.make_mesh(1)
    state = cd.replicas.replicate(jnp.float32(0), mesh)
    run = cd.replicas.steps(lambda state, batch: (state, {}), mesh)
    with pytest.raises(ValueError, match=message):
        run(state, batches)


def test_what_is_not_known_is_not_given():
    tx = optimizer(triggers.drift(0.5))
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    batch = stacked(helpers.make_gradients(2, REPLICAS))
    with pytest.raises(ValueError, match="known only of an optimizer whose trigger"):
        several(tx, mesh).lower(state, batch, begins=[1])
    at_once = several(optimizer(triggers.every_k(2)), mesh)
    state = helpers.start(optimizer(triggers.every_k(2)), helpers.make_params(), mesh)
    with pytest.raises(ValueError, match="ends= is for a synchronizer with a delay"):
        at_once.lower(state, batch, begins=[], ends=[1])
