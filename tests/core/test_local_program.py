"""A local step sends one scalar: seen in the compiled program."""

import math
import re

import helpers
import hlo
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers
from curvadion_jax._collectives import _replicas

REPLICAS = 8
# Steps within which every optimizer here synchronises.
MANY = 200
AXIS = helpers.AXIS


def with_every_part():
    """Combined triggers, an outer optimizer, all state averaged."""
    change = triggers.relative_momentum_change(optax.linear_schedule(0.3, 0.1, 9))
    trigger = triggers.any_of(triggers.after_steps(triggers.every_k(7), 2), change)
    return helpers.synced_dion(
        0.1,
        0.25,
        triggers.at_least_every(triggers.at_most_every(trigger, 2), 9),
        synchronizers.reconcile(optax.adam(0.1), other_state=True),
        axis_name=AXIS,
    )


OPTIMIZERS = {
    "curvadion": lambda: cd.curvadion(0.1, axis_name=AXIS),
    "local_muon": lambda: cd.local_muon(0.1, axis_name=AXIS),
    "averaging_dion": lambda: helpers.averaging_dion(axis_name=AXIS),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, axis_name=AXIS),
    "paper": lambda: cd.presets.paper(0.1, axis_name=AXIS),
    "authors_code": lambda: cd.presets.authors_code(0.1, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.1, axis_name=AXIS),
    "diloco": lambda: cd.presets.diloco(0.1, axis_name=AXIS),
    "muloco": lambda: cd.presets.muloco(0.1, axis_name=AXIS),
    "every-part": with_every_part,
}
IN_CODES = ("curvadion", "local_muon")
# Those with `reconcile`: one step, and a sync after it.
AFTER_THE_STEP = (
    *(*IN_CODES, "averaging_dion", "local_sgd", "diloco", "muloco", "every-part"),
)
QUICKLY_COMPILED = ("local_muon",)


def test_all_presets_are_looked_at():
    presets = {
        name
        for name, value in vars(cd.presets).items()
        if getattr(value, "__module__", "").startswith(cd.presets.__name__)
        and not name.startswith("_")
    }
    others = {*IN_CODES, "averaging_dion", "every-part"}
    assert presets == set(OPTIMIZERS) - others


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(x, marks=() if x in QUICKLY_COMPILED else pytest.mark.slow)
        for x in OPTIMIZERS
    ],
)
def compiled(request):
    """One step on 8 devices, its program, the state it starts from, and a name."""
    tx, mesh = OPTIMIZERS[request.param](), cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh).lower(state, batch).compile()
    program = hlo.parse(step.as_text())
    return program, lambda state: step(state, batch)[0], state, request.param


def test_one_scalar_is_sent_outside_of_the_sync_branch(compiled):
    program, *_, name = compiled
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    _, sync = conditional.called
    inside = program.collectives([sync])
    assert len(program.collectives([program.entry])) == 1 + len(inside)
    kinds = {"all-to-all" if name in IN_CODES else "all-reduce", "all-gather"}
    assert {instruction.opcode for instruction in inside} == kinds


def test_the_local_branch_sends_nothing(compiled):
    program, *_, name = compiled
    (conditional,) = program.conditionals()
    local, _ = conditional.called
    # After the local step there is nothing to do; else the step is in the branch.
    assert (len(program.reachable([local])) > 1) == (name not in AFTER_THE_STEP)
    assert program.collectives([local]) == []


def bytes_counted_at_a_sync(step, state):
    """[[averaged high, low], [gathered high, low]] of every replica."""
    for _ in range(MANY):
        before = np.asarray(state[1].metrics.sent)
        state = step(state)
        if state[1].metrics.synced.all():
            return np.asarray(state[1].metrics.sent) - before
    raise AssertionError("no sync")


def test_a_sync_sends_the_bytes_that_metrics_count(compiled):
    program, step, state, name = compiled
    (conditional,) = program.conditionals()
    inside = program.collectives(conditional.called)
    (weights,) = [
        x
        for x in inside
        if x.opcode == "all-gather" and x.shape.startswith(f"f32[{REPLICAS}]")
    ]
    sent = sum(x.bytes for x in inside) - weights.bytes
    if name in IN_CODES:
        # Two stages of codes. Every array is a block, and these four are padded to
        # one for each replica.
        sent *= len(helpers.SHAPES) / REPLICAS / 2
    # And 4 bytes to decide, and as many of the replica's weight.
    expected = [[0, sent + 4], [0, 4]]
    assert bytes_counted_at_a_sync(step, state).tolist() == [expected] * REPLICAS


# Dion's other gradients, P and R; drift and momenta; no codes; else one.
AVERAGED = {"synchronous_dion": 3, "averaging_dion": 2, "every-part": 2}
AVERAGED |= dict.fromkeys(IN_CODES, 0)


def averaged_arrays(program) -> list[int]:
    """Elements of every float32 array that is averaged over the replicas."""
    all_reduces = [
        x for x in program.collectives([program.entry]) if x.opcode == "all-reduce"
    ]
    shapes = [s for x in all_reduces for s in re.findall(r"f32\[([\d,]*)\]", x.shape)]
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def test_a_sync_averages_few_arrays(compiled):
    """On a CPU they are sent one after another, which on a long link takes its time."""
    program, *_, name = compiled
    assert len(averaged_arrays(program)) == AVERAGED.get(name, 1)


@pytest.mark.parametrize("limit", [0, 21, 100])
def test_large_arrays_are_sent_by_themselves(limit, monkeypatch):
    monkeypatch.setattr(_replicas, "_SMALL", 4 * limit)
    tx = cd.presets.local_sgd(0.1, k=1, axis_name=AXIS)
    mesh = cd.replicas.make_mesh(2)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    step = helpers.replica_step(tx, mesh)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    sizes = [math.prod(shape) for shape in helpers.SHAPES.values()]
    expected = [size for size in sizes if size > limit]
    if limit:
        expected.append(sum(sizes) - sum(expected))
    assert sorted(averaged_arrays(program)) == sorted(expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="anchor"),
        pytest.param(
            {
                "outer": optax.sgd(0.7, 0.9, nesterov=True),
                "compressor": compressors.quantize(4),
            },
            id="anchor-error-momentum",
        ),
    ],
)
def test_a_local_step_copies_nothing_of_the_synchronizers(options):
    synchronizer = synchronizers.reconcile(momentum=False, **options)
    tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), triggers.every_k(5), synchronizer, AXIS)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh, donate=True)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    entry = program.computations[program.entry]
    copied = [x.bytes for x in entry if x.opcode == "copy"]
    sizes = [x.nbytes for x in helpers.make_params().values()]
    counters = [x.nbytes // REPLICAS for x in jax.tree.leaves(state[1].metrics)]
    assert max(counters) < min(sizes)
    # The CPU compiler copies the new parameters out of `params + updates`, with or
    # without syncs, and the momentum, which stays where the gradients are not finite;
    # and there are counters, some of which are copied twice.
    assert sum(x for x in copied if x >= min(sizes)) <= 2 * sum(sizes)
    assert sum(x for x in copied if x < min(sizes)) <= 2 * sum(counters)


@pytest.mark.slow
def test_a_sharded_replica_talks_to_others_through_the_flag_alone():
    """Two replicas of two devices, {0, 1} and {2, 3}, the matrices split over them."""
    tx, mesh = OPTIMIZERS["averaging_dion"](), cd.replicas.make_mesh(2, {"fsdp": 2})

    def shard(x):
        split = x.shape in {(2, *helpers.SHAPES[name]) for name in helpers.MATRICES}
        spec = PartitionSpec("replica", "fsdp") if split else PartitionSpec("replica")
        return jax.device_put(x, NamedSharding(mesh, spec))

    state = jax.tree.map(shard, helpers.start(tx, helpers.make_params(), mesh))
    (batch,) = helpers.make_gradients(1, 2)
    step = helpers.replica_step(tx, mesh)
    program = hlo.parse(step.lower(state, batch).compile().as_text())

    def across(names, branches=True):
        return [
            instruction
            for instruction in program.collectives(names, branches)
            if not all(group in ([0, 1], [2, 3]) for group in instruction.groups)
        ]

    (flag,) = across([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    # No other one, such as to restart a replica's state, moves anything.
    (conditional,) = program.conditionals()
    local, sync = conditional.called
    assert across([local]) == []
    # Within the replica the local step in front does communicate.
    assert len(program.collectives([program.entry], branches=False)) > 1
    assert across([sync])
