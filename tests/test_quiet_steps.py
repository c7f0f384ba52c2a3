"""A quiet step sends one scalar: seen in the values, and in the compiled program."""

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
AXIS = helpers.AXIS


def with_every_part():
    """Combined triggers, a local step, an outer optimizer, all state averaged."""
    change = triggers.relative_momentum_change(optax.linear_schedule(0.3, 0.1, 9))
    trigger = triggers.any_of(triggers.after_steps(triggers.every_k(7), 2), change)
    return cd.curvadion(
        0.1,
        axis_name=AXIS,
        trigger=triggers.at_least_every(triggers.at_most_every(trigger, 2), 9),
        synchronizer=synchronizers.reconcile(optax.adam(0.1), other_state=True),
        local_step=optax.sgd(0.1, 0.9),
    )


OPTIMIZERS = {
    "curvadion": lambda: cd.curvadion(0.1, axis_name=AXIS),
    "averaging_dion": lambda: helpers.averaging_dion(axis_name=AXIS),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, axis_name=AXIS),
    "paper": lambda: cd.presets.paper(0.1, axis_name=AXIS),
    "authors_code": lambda: cd.presets.authors_code(0.1, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.1, axis_name=AXIS),
    "diloco": lambda: cd.presets.diloco(0.1, axis_name=AXIS),
    "muloco": lambda: cd.presets.muloco(0.1, axis_name=AXIS),
    "every-part": with_every_part,
}
# Those with `reconcile` and no other local step: one step, and a sync after it.
AFTER_THE_STEP = ("curvadion", "averaging_dion", "local_sgd", "diloco", "muloco")
QUICKLY_COMPILED = ("curvadion",)


def test_all_presets_are_looked_at():
    presets = {
        name
        for name, value in vars(cd.presets).items()
        if getattr(value, "__module__", "") == cd.presets.__name__
        and not name.startswith("_")
    }
    others = {"curvadion", "averaging_dion", "every-part"}
    assert presets == set(OPTIMIZERS) - others


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(x, marks=() if x in QUICKLY_COMPILED else pytest.mark.slow)
        for x in OPTIMIZERS
    ],
)
def compiled(request):
    """The program of one step on 8 devices, and the state it starts from."""
    tx, mesh = OPTIMIZERS[request.param](), cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    return program, state, request.param


def test_one_scalar_is_sent_outside_of_the_sync_branch(compiled):
    program, _, name = compiled
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    _, sync = conditional.called
    inside = program.collectives([sync])
    assert len(program.collectives([program.entry])) == 1 + len(inside)
    kinds = {"all-to-all" if name == "curvadion" else "all-reduce", "all-gather"}
    assert {instruction.opcode for instruction in inside} == kinds


def test_the_quiet_branch_sends_nothing(compiled):
    program, _, name = compiled
    (conditional,) = program.conditionals()
    quiet, _ = conditional.called
    # After the local step there is nothing to do; else the step is in the branch.
    assert (len(program.reachable([quiet])) > 1) == (name not in AFTER_THE_STEP)
    assert program.collectives([quiet]) == []


def test_a_sync_sends_the_bytes_that_metrics_count(compiled):
    program, (_, opt_state), name = compiled
    (conditional,) = program.conditionals()
    inside = program.collectives(conditional.called)
    (weights,) = [
        x
        for x in inside
        if x.opcode == "all-gather" and x.shape.startswith(f"f32[{REPLICAS}]")
    ]
    sent = sum(x.bytes for x in inside) - weights.bytes
    if name == "curvadion":
        # Two stages of codes. Every array is a block, and these four are padded to
        # one for each replica.
        sent *= len(helpers.SHAPES) / REPLICAS / 2
    assert opt_state.metrics.sync_payload.tolist() == [[0, sent]] * REPLICAS


# Dion's other gradients, P and R; drift and momenta; `curvadion` sends codes; else one.
AVERAGED = {"synchronous_dion": 3, "averaging_dion": 2, "every-part": 2, "curvadion": 0}


def averaged_arrays(program) -> list[int]:
    """Elements of every float32 array that is averaged over the replicas."""
    all_reduces = [
        x for x in program.collectives([program.entry]) if x.opcode == "all-reduce"
    ]
    shapes = [s for x in all_reduces for s in re.findall(r"f32\[([\d,]*)\]", x.shape)]
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def test_a_sync_averages_few_arrays(compiled):
    """On a CPU they are sent one after another, which on a long link takes its time."""
    program, _, name = compiled
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
def test_a_quiet_step_copies_nothing_of_the_synchronizers(options):
    synchronizer = synchronizers.reconcile(momentum=False, **options)
    tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), triggers.every_k(5), synchronizer, AXIS)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh, donate=True)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    entry = program.computations[program.entry]
    copied = sum(x.bytes for x in entry if x.opcode == "copy")
    # The CPU compiler copies the new parameters out of `params + updates`, with or
    # without syncs, and the momentum, which stays where the gradients are not finite;
    # and there are counters of at most 4 bytes a number, a few of which are copied
    # twice. (The smallest parameter has 20 bytes.)
    parameters = sum(x.nbytes for x in helpers.make_params().values())
    numbers = sum(x.size for x in state[1].metrics) // REPLICAS
    assert copied <= 2 * parameters + 4 * (numbers + 4)


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
    # Another one draws Q for a replica whose state starts afresh, within the replica.
    (conditional,) = [x for x in program.conditionals() if any(map(across, [x.called]))]
    quiet, sync = conditional.called
    assert across([quiet]) == []
    # Within the replica the local step in front does communicate.
    assert len(program.collectives([program.entry], branches=False)) > 1
    assert across([sync])


CHANGED, KEPT = 1, [0, 2]
LOCAL = {
    "sgd": cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        synchronizers.reconcile(),
        AXIS,
    ),
    "curvadion": cd.curvadion(
        0.1, axis_name=AXIS, trigger=triggers.relative_momentum_change(1e6)
    ),
    "averaging_dion": helpers.averaging_dion(
        0.1,
        0.5,
        orthonormalize=cd.householder_qr,
        axis_name=AXIS,
        trigger=triggers.relative_momentum_change(1e6),
    ),
    "paper": cd.presets.paper(0.1, 1e6, axis_name=AXIS),
    "authors_code": cd.presets.authors_code(0.1, 1e6, axis_name=AXIS),
    "factors-every_k": cd.curvadion(
        0.1,
        0.5,
        axis_name=AXIS,
        trigger=triggers.every_k(4),
        synchronizer=synchronizers.average_factors(),
    ),
}
SLOW = ("curvadion", "averaging_dion", "paper", "authors_code", "factors-every_k")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in LOCAL],
)
def test_another_replicas_gradient_changes_nothing_until_the_sync(name):
    """Three replicas, four steps, of which 1 and 2 are quiet; one gradient differs."""
    gradients = helpers.make_gradients(4, 3)
    gradients[3]["tall"] *= 1e9  # the last step synchronises
    changed = [jax.tree.map(np.copy, tree) for tree in gradients]
    for array in changed[1].values():
        array[CHANGED] *= -3
    mesh = cd.replicas.make_mesh(3)
    tx = LOCAL[name]
    first = helpers.start(tx, helpers.make_params(), mesh)
    step = helpers.quick(helpers.replica_step(tx, mesh), first, gradients[0])
    one = other = step(first, gradients[0])[0]
    for index in (1, 2):
        one, _ = step(one, gradients[index])
        other, _ = step(other, changed[index])
        assert not np.asarray(one[1].metrics.synced).any()
        helpers.assert_bitwise(rows(one, KEPT), rows(other, KEPT))
        assert differs(rows(one, [CHANGED]), rows(other, [CHANGED]))
    one, _ = step(one, gradients[3])
    other, _ = step(other, gradients[3])
    assert np.asarray(one[1].metrics.synced).all()
    assert np.asarray(other[1].metrics.synced).all()


def rows(state, replicas):
    return jax.tree.map(lambda x: np.asarray(x)[replicas], state)


def differs(one, other):
    (params, _), (others, _) = one, other
    return all((params[name] != others[name]).all() for name in helpers.MATRICES)


@pytest.mark.slow
def test_a_sync_lets_the_change_through():
    # What the test above would see if quiet steps leaked.
    inner, trigger = optax.sgd(0.1, 0.9), triggers.always()
    tx = cd.adaptive_sync(inner, trigger, synchronizers.reconcile(), AXIS)
    gradients = helpers.make_gradients(1, 3)
    changed = [jax.tree.map(np.copy, gradients[0])]
    changed[0]["tall"][CHANGED] *= -3
    one, other = (
        helpers.last(helpers.run_mesh(tx, helpers.make_params(), each))
        for each in (gradients, changed)
    )
    assert (rows(one, KEPT)[0]["tall"] != rows(other, KEPT)[0]["tall"]).all()
