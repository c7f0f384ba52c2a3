"""Several steps in one program are the same steps, and delayed syncs need none."""

import re
from typing import Any

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


def compared(tx, number, steps, replicas=REPLICAS):
    """States after as many steps, one at a time and several at once."""
    mesh = cd.replicas.make_mesh(replicas)
    one = many = helpers.start(tx, helpers.make_params(), mesh)
    gradients = helpers.make_gradients(steps, replicas)
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


def test_any_number_of_steps_where_the_program_decides():
    """The first number is not that of all later programs."""
    mesh, tx = cd.replicas.make_mesh(REPLICAS), optimizer(triggers.drift(0.5))
    one = many = helpers.start(tx, helpers.make_params(), mesh)
    gradients = helpers.make_gradients(10, REPLICAS)
    step, run = helpers.replica_step(tx, mesh), several(tx, mesh)
    for tree in gradients:
        one, _ = step(one, tree)
    first = 0
    for number in (3, 5, 2):
        many, found = run(many, stacked(gradients[first : first + number]))
        first += number
        assert {len(x) for x in jax.tree.leaves(found)} == {number}
    jax.tree.map(close, jax.device_get(one), jax.device_get(many))


def test_steps_outside_of_the_program_are_rejected():
    tx = optimizer(triggers.every_k(2))
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    batches = stacked(helpers.make_gradients(4, REPLICAS))
    for places in ([4], [-1]):
        with pytest.raises(ValueError, match=r"from 0 to 3, got \["):
            several(tx, mesh).trace(state, batches, begins=places)


def test_codes_of_two_stages():
    tx = optimizer(triggers.every_k(3), delay=3, compressor=compressors.quantize(2))
    one, many, _ = compared(tx, 6, 12, replicas=4)
    assert one[1].metrics.syncs.tolist() == [4] * 4
    jax.tree.map(close, one, many)


@pytest.mark.parametrize("shapes", [(3,), {"a": (2, 3), "none": (0,)}])
def test_any_tree_of_parameters(shapes):
    tx = optimizer(triggers.every_k(2), delay=2)
    of = lambda make: jax.tree.map(make, shapes, is_leaf=lambda x: type(x) is tuple)  # noqa: E731
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, of(lambda shape: jnp.zeros(shape)), mesh)
    batch = of(lambda shape: np.ones((4, REPLICAS, *shape), np.float32))
    (_, opt_state), _ = several(tx, mesh)(state, batch)
    assert opt_state.metrics.syncs.tolist() == [2] * REPLICAS


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
    ("form", "name"),
    [
        pytest.param(None, "all-reduce", id="exact"),
        pytest.param(compressors.quantize(2), "all-gather", id="codes"),
        pytest.param(
            compressors.quantize(2, mean_bits=4), "all-to-all", id="first stage"
        ),
    ],
)
def test_what_is_sent_depends_on_none_of_the_steps_before_it(form, name):
    """Of 8 steps: a loop of 7, and the one on which the sync ends."""
    tx = optimizer(triggers.every_k(8), delay=8, compressor=form)
    program = ending_last(tx)
    assert not program.conditionals()
    assert loops_behind(program, name) == {0}


def test_what_is_injected_depends_on_none_either():
    synchronizer = synchronizers.reconcile(
        momentum=False, delay=8, compressor=compressors.quantize(2)
    )

    def make(rate):
        trigger = triggers.every_k(8)
        return cd.adaptive_sync(optax.sgd(rate), trigger, synchronizer, AXIS)

    program = ending_last(optax.inject_hyperparams(make)(rate=0.1))
    assert loops_behind(program, "all-gather") == {0}


@pytest.mark.parametrize(
    "form",
    [
        *(None, compressors.quantize(2)),
    ],
)
def test_nor_where_a_replica_has_several_devices(form):
    """Its devices ask each other whether all is finite, of the steps and of the sync.

    XLA may make one all-reduce of several of a kind, so these must be of two.
    """
    tx = optimizer(triggers.every_k(8), delay=8, compressor=form)
    program = ending_last(tx, cd.replicas.make_mesh(REPLICAS, {"fsdp": 4}))
    entry = {x.name: x for x in program.computations[program.entry]}
    crossing = [x for x in entry.values() if x.communicates and not x.joins(4)]
    weights, arrays = "all-gather", "all-gather" if form else "all-reduce"
    assert {x.opcode for x in crossing} == {weights, arrays}
    sent = [x.name for x in crossing]
    assert loops_behind(program, *sent) == {0}
    first = set().union(*(reached(entry, name) for name in sent))
    asked = {x.name for x in entry.values() if x.communicates and x.joins(4)}
    kinds = [
        {kind for name in names for kind in re.findall(r"(\w+)\[", entry[name].shape)}
        for names in (asked & first, asked - first)
    ]
    assert all(kinds), "nothing was asked"
    assert not kinds[0] & kinds[1]


def ending_last(tx, mesh=None):
    """A program of 8 steps, on the last of which a sync ends and the next begins."""
    mesh = mesh or cd.replicas.make_mesh(REPLICAS)
    params = helpers.make_params()
    if "fsdp" in mesh.axis_names:
        divide = lambda x: P("fsdp") if x.shape and x.shape[0] % 4 == 0 else P()  # noqa: E731
        places = jax.tree.map(lambda x: NamedSharding(mesh, divide(x)), params)
        params = jax.device_put(params, places)
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    batch = stacked(helpers.make_gradients(8, REPLICAS))
    lowered = several(tx, mesh).lower(state, batch, begins=[7], ends=[7])
    return hlo.parse(lowered.compile().as_text() or "")


def loops_behind(program, *names):
    """On how many loops of steps the collectives of these names depend."""
    entry = program.computations[program.entry]
    found = {x.name: x for x in entry}
    loops = {x.name for x in entry if x.opcode == "while"}
    assert len(loops) == 1
    sent = [x.name for x in entry if x.opcode.startswith(names) or x.name in names]
    return {len(loops & reached(found, each)) for each in sent}


def reached(found, name):
    """What an instruction of the entry computation is computed from."""
    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in found and name not in seen:
            seen.add(name)
            waiting += found[name].operands
    return seen


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
