"""A local step sends nothing, or one scalar where replicas vote: seen in programs."""

import functools

import helpers
import hlo
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

REPLICAS = 8
# Steps within which every optimizer here synchronises.
MANY = 200
AXIS = helpers.AXIS


def sgd(trigger, synchronizer=None):
    synchronizer = synchronizer or synchronizers.reconcile()
    return cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, synchronizer, AXIS)


def with_every_part():
    """Combined triggers, an outer optimizer, momenta averaged."""
    change = triggers.relative_momentum_change(optax.linear_schedule(0.3, 0.1, 9))
    return helpers.synced_dion(
        0.1,
        0.25,
        triggers.at_least_every(change, 9),
        synchronizers.reconcile(optax.adam(0.1)),
        axis_name=AXIS,
    )


# The number of the step settles the decision, and the host knows it.
SCHEDULED = {
    "local_muon": lambda: cd.local_muon(0.1, budget=0.2, axis_name=AXIS),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.1, 3, axis_name=AXIS),
    "diloco": lambda: cd.presets.diloco(0.1, 3, axis_name=AXIS),
    "muloco": lambda: cd.presets.muloco(0.1, 3, axis_name=AXIS),
    "gradients": lambda: sgd(triggers.every_k(3), synchronizers.average_gradients()),
}
# Replicas vote on every step.
VOTING = {
    "curvadion": lambda: cd.curvadion(0.1, axis_name=AXIS),
    "averaging_dion": lambda: helpers.averaging_dion(axis_name=AXIS),
    "paper": lambda: cd.presets.paper(0.1, axis_name=AXIS),
    "authors_code": lambda: cd.presets.authors_code(0.1, axis_name=AXIS),
    "every-part": with_every_part,
}
# Replicas vote on steps that the host knows.
AT_INTERVALS = {
    "at_intervals": lambda: cd.curvadion(0.1, axis_name=AXIS, decision_interval=3)
}
OPTIMIZERS = SCHEDULED | VOTING | AT_INTERVALS
IN_CODES = ("curvadion", "at_intervals", "local_muon")
# In whose sync the step itself is: the branches are steps, and not what follows one.
IN_THE_STEP = ("paper", "authors_code")
QUICK = ("local_muon", "at_intervals")


@functools.cache
def prepare(name: str, replicas: int = REPLICAS):
    """A step, and what it is given."""
    tx, mesh = OPTIMIZERS[name](), cd.replicas.make_mesh(replicas)
    (batch,) = helpers.make_gradients(1, replicas)
    state = helpers.start(tx, helpers.make_params(), mesh)
    return helpers.replica_step(tx, mesh), (state, batch)


@functools.cache
def compiled(name: str):
    """The program of a step on which a decision is due."""
    step, arguments = prepare(name)
    return step.lower(*arguments, due=None if name in VOTING else True).compile()


def program_of(name: str) -> hlo.Program:
    return hlo.parse(compiled(name).as_text())


def equations(step, arguments, due):
    return helpers.equations(helpers.program_of(step, *arguments, due=due))


def conditions(found):
    return sum(x.primitive.name in ("cond", "while") for x in found)


def talks(equation):
    names = equation.params.get("axes", ()), equation.params.get("axis_name", ())
    silent = equation.primitive.name in ("axis_index", "pvary")
    return AXIS in jax.tree.leaves(names) and not silent


@pytest.mark.parametrize("name", helpers.slow_but(QUICK[:1], SCHEDULED | AT_INTERVALS))
def test_a_step_that_is_not_due_sends_nothing_and_decides_nothing(name):
    step, arguments = prepare(name, 2)
    local, due = (equations(step, arguments, each) for each in (False, True))
    assert not [x for x in local if talks(x)]
    assert [x for x in due if talks(x)]
    # Muon and Dion have conditions of their own, by which they orthonormalise.
    assert conditions(local) <= conditions(due)
    if name in ("local_sgd", "gradients"):
        assert conditions(local) == 0


@pytest.mark.parametrize("name", QUICK)
def test_the_compiled_step_that_is_not_due_sends_nothing(name):
    step, arguments = prepare(name)
    text = step.lower(*arguments, due=False).compile().as_text()
    program = hlo.parse(text)
    assert not program.collectives([program.entry])
    assert not program.conditionals()
    assert "all-reduce" not in text


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, VOTING | AT_INTERVALS))
def test_a_vote_sends_one_scalar_and_the_local_branch_nothing(name):
    program = program_of(name)
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    local, sync = conditional.called
    # After the local step there is nothing to do; else the step is in the branch.
    assert (len(program.reachable([local])) > 1) == (name in IN_THE_STEP)
    assert program.collectives([local]) == []
    inside = program.collectives([sync])
    assert len(program.collectives([program.entry])) == 1 + len(inside)
    kinds = {"all-to-all" if name in IN_CODES else "all-reduce", "all-gather"}
    assert {instruction.opcode for instruction in inside} == kinds


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, SCHEDULED))
def test_what_is_scheduled_needs_no_vote(name):
    program = program_of(name)
    shapes = [x.shape for x in program.collectives([program.entry])]
    assert shapes
    assert not [x for x in shapes if "s32" in x]


def bytes_counted_at_a_sync(name):
    """[[averaged high, low], [gathered high, low]] of every replica."""
    (state, batch), step = prepare(name)[1], compiled(name)
    for _ in range(MANY):
        before = np.asarray(state[1].metrics.sent)
        state, _ = step(state, batch)
        if state[1].metrics.synced.all():
            return np.asarray(state[1].metrics.sent) - before
    raise AssertionError("no sync")


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_sync_sends_the_bytes_that_metrics_count(name):
    program = program_of(name)
    sent = [x for x in program.collectives([program.entry]) if x.shape != "s32[]"]
    (weights,) = [
        x
        for x in sent
        if x.opcode == "all-gather" and x.shape.startswith(f"f32[{REPLICAS}]")
    ]
    total = sum(x.bytes for x in sent) - weights.bytes
    if name in IN_CODES:
        # Two stages of codes. Every array is a block, and these four are padded to
        # one for each replica.
        total *= len(helpers.SHAPES) / REPLICAS / 2
    vote = 0 if name in SCHEDULED else 4
    # And 4 bytes of the replica's weight.
    expected = [[0, total + vote], [0, 4]]
    assert bytes_counted_at_a_sync(name).tolist() == [expected] * REPLICAS


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
    synchronizer = synchronizers.reconcile(**options)
    tx, mesh = sgd(triggers.every_k(5), synchronizer), cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh, donate=True)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    copied = [
        x.bytes for x in program.computations[program.entry] if x.opcode == "copy"
    ]
    sizes = [x.nbytes for x in helpers.make_params().values()]
    counters = [x.nbytes // REPLICAS for x in jax.tree.leaves(state[1].metrics)]
    assert max(counters) < min(sizes)
    # The CPU compiler copies the new parameters out of `params + updates`, with or
    # without syncs; and there are counters, some of which are copied twice.
    assert sum(x for x in copied if x >= min(sizes)) <= 2 * sum(sizes)
    assert sum(x for x in copied if x < min(sizes)) <= 2 * sum(counters)


@pytest.mark.slow
def test_a_sharded_replica_talks_to_others_through_the_flag_alone():
    """Two replicas of two devices, {0, 1} and {2, 3}, the matrices split over them."""
    tx, mesh = OPTIMIZERS["averaging_dion"](), cd.replicas.make_mesh(2, {"fsdp": 2})

    def shard(x):
        split = x.shape in {(2, *helpers.SHAPES[name]) for name in helpers.MATRICES}
        spec = PartitionSpec(AXIS, "fsdp") if split else PartitionSpec(AXIS)
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


def test_what_is_traced_for_one_step_does_not_serve_another():
    """JAX keeps traces of a jitted function: which program it is goes with them."""
    tx, mesh = OPTIMIZERS["local_sgd"](), cd.replicas.make_mesh(2)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    train = jax.jit(of_rows(helpers.train_step(tx)))
    for _ in range(2):
        step, now = cd.replicas.step(train, mesh, donate=False), state
        for _ in range(3):
            now, _ = step(now, batch)
        assert now[1].metrics.syncs.tolist() == [1, 1]
        assert now[1].metrics.votes.tolist() == [0, 0]


@pytest.mark.slow
def test_steps_of_two_optimizers_in_turn_need_no_vote():
    """As those of a GAN: each hands the other's state through."""
    tx, mesh = OPTIMIZERS["local_sgd"](), cd.replicas.make_mesh(2)
    both = dict.fromkeys("ab", helpers.start(tx, helpers.make_params(), mesh))
    (batch,) = helpers.make_gradients(1, 2)
    train = of_rows(helpers.train_step(tx))
    for one in "ab":
        turn = lambda both, x, one=one: (both | {one: train(both[one], x)[0]}, {})
        step = cd.replicas.step(turn, mesh)
        for _ in range(3):
            both, _ = step(both, batch)
        assert both[one][1].metrics.syncs.tolist() == [1, 1]
        assert both[one][1].metrics.votes.tolist() == [0, 0]


def of_rows(train):
    """The step for gradients [replicas, ...], of which a replica has one row."""
    return lambda state, batch: train(state, jax.tree.map(lambda g: g[0], batch))


@pytest.mark.parametrize("due", [True, np.False_])
def test_the_caller_may_say_what_the_step_is(due):
    """In a loop of one's own, under `shard_map`."""
    tx, mesh = OPTIMIZERS["local_sgd"](), cd.replicas.make_mesh(2)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    train = of_rows(
        helpers.train_step(tx._replace(update=functools.partial(tx.update, due=due)))
    )
    step = jax.jit(helpers.in_shard_map(train, mesh))
    found = helpers.equations(step.trace(state, batch).jaxpr.jaxpr)
    assert any(map(talks, found)) == due
    (_, opt_state), _ = step(state, batch)
    assert opt_state.metrics.syncs.tolist() == [due] * 2
    assert opt_state.metrics.votes.tolist() == [0] * 2
    mapped = cd.replicas.step(train, mesh, donate=False)
    helpers.assert_bitwise(mapped(state, batch)[0], step(state, batch)[0])


@pytest.mark.parametrize(
    "name", helpers.slow_but(QUICK, ["local_muon", "averaging_dion", "paper"])
)
def test_another_replicas_gradient_changes_nothing_until_the_sync(name):
    """Three replicas, four steps, of which 1 and 2 are local; one gradient differs."""
    changed_one, kept = 1, [0, 2]
    trigger = triggers.relative_momentum_change(1e6)
    tx = {
        "local_muon": lambda: cd.local_muon(0.1, axis_name=AXIS, trigger=trigger),
        "averaging_dion": lambda: helpers.averaging_dion(
            0.1, 0.5, axis_name=AXIS, trigger=trigger
        ),
        "paper": lambda: cd.presets.paper(0.1, 1e6, axis_name=AXIS),
    }[name]()
    gradients = helpers.make_gradients(4, 3)
    gradients[3]["tall"] *= 1e9  # the last step synchronises
    other = [jax.tree.map(np.copy, tree) for tree in gradients]
    for array in other[1].values():
        array[changed_one] *= -3
    runs = [
        list(helpers.run_mesh(tx, helpers.make_params(), each))
        for each in (gradients, other)
    ]
    for run in runs:
        assert helpers.decisions(run) == [True, False, False, True]
    for one, two in [*zip(*runs, strict=True)][1:3]:
        rows = jax.tree.map(lambda x: x[kept], (one, two))
        helpers.assert_bitwise(*rows)
        for key in helpers.MATRICES:
            assert (one[0][key][changed_one] != two[0][key][changed_one]).all()
    if name != "paper":  # whose sync knows gradients alone
        (one, _), (two, _) = (run[-1] for run in runs)
        assert (one["tall"][kept] != two["tall"][kept]).any()
