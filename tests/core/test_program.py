"""What steps send and hold, seen in compiled programs on a mesh."""

import functools

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

REPLICAS = 8
# Steps within which every optimizer here synchronises.
MANY = 200


def sgd(mesh, trigger, synchronizer=None):
    synchronizer = synchronizer or synchronizers.reconcile()
    return cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, synchronizer, mesh)


def with_every_part(mesh):
    """Combined triggers, an outer optimizer, a clip in front."""
    change = triggers.relative_momentum_change(optax.linear_schedule(0.3, 0.1, 9))
    return helpers.synced_dion(
        0.1,
        0.25,
        triggers.at_least_every(change, 9),
        synchronizers.reconcile(optax.adam(0.1)),
        mesh=mesh,
        before=optax.clip_by_global_norm(1.0),
    )


# The number of the step settles the decision.
SCHEDULED = {
    "local_muon": lambda mesh: cd.local_muon(0.1, budget=0.2, mesh=mesh),
    "synchronous_dion": lambda mesh: cd.presets.synchronous_dion(0.1, mesh=mesh),
    "local_sgd": lambda mesh: cd.presets.local_sgd(0.1, 3, mesh=mesh),
    "diloco": lambda mesh: cd.presets.diloco(0.1, 3, mesh=mesh),
    "muloco": lambda mesh: cd.presets.muloco(0.1, 3, mesh=mesh),
    "gradients": lambda mesh: sgd(
        mesh, triggers.every_k(3), synchronizers.average_gradients()
    ),
    "clipped": lambda mesh: cd.presets.local_sgd(
        0.1, 3, mesh=mesh, before=optax.clip_by_global_norm(1.0)
    ),
}
# Replicas vote on every step.
VOTING = {
    "curvadion": lambda mesh: cd.curvadion(0.1, mesh=mesh),
    "averaging_dion": lambda mesh: helpers.averaging_dion(mesh=mesh),
    "change": lambda mesh: sgd(mesh, triggers.relative_momentum_change(0.3)),
    "paper": lambda mesh: cd.presets.paper(0.1, mesh=mesh),
    "authors_code": lambda mesh: cd.presets.authors_code(0.1, mesh=mesh),
    "every-part": with_every_part,
}
AT_INTERVALS = {
    "at_intervals": lambda mesh: cd.curvadion(0.1, mesh=mesh, decision_interval=3)
}
OPTIMIZERS = SCHEDULED | VOTING | AT_INTERVALS
IN_CODES = ("curvadion", "at_intervals", "local_muon")
QUICK = ("local_sgd", "gradients", "change")


@functools.cache
def prepare(name: str, replicas: int = REPLICAS):
    """A step, and what it is given."""
    mesh = cd.replicas.make_mesh(replicas)
    tx = OPTIMIZERS[name](mesh)
    (batch,) = helpers.make_gradients(1, replicas)
    state = helpers.start(tx, helpers.make_params(), mesh)
    step = jax.jit(helpers.train_step(tx), static_argnames="due")
    return step, (state, batch)


@functools.cache
def compiled(name: str, due: bool | None = None):
    step, arguments = prepare(name)
    return step.lower(*arguments, due=due).compile()


def program_of(name: str, due: bool | None = None) -> hlo.Program:
    return hlo.parse(compiled(name, due).as_text())


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_step_that_is_not_due_sends_nothing_and_has_no_condition(name):
    program = program_of(name, due=False)
    assert not program.collectives([program.entry])
    assert not program.conditionals()
    step, arguments = prepare(name)
    jaxpr = step.trace(*arguments, due=False).jaxpr.jaxpr
    found = {x.primitive.name for x in helpers.equations(jaxpr)}
    assert not found & {"psum", "pmax", "all_gather", "all_to_all"}
    if name in ("local_sgd", "gradients", "change"):
        # Muon and Dion have conditions of their own, by which they orthonormalise.
        assert not found & {"cond", "while"}


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, VOTING | AT_INTERVALS))
def test_a_vote_sends_one_integer_and_the_local_branch_nothing(name):
    program = program_of(name)
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    branches = [program.collectives([branch]) for branch in conditional.called]
    local, inside = sorted(branches, key=len)
    assert local == []
    assert len(program.collectives([program.entry])) == 1 + len(inside)
    kinds = {"all-to-all" if name in IN_CODES else "all-reduce", "all-gather"}
    assert {instruction.opcode for instruction in inside} == kinds


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, SCHEDULED))
def test_what_is_scheduled_sends_nothing_outside_of_a_sync(name):
    program = program_of(name)
    shapes = [x.shape for x in program.collectives([program.entry])]
    assert shapes
    assert not [x for x in shapes if "s32" in x]
    if name != "synchronous_dion":  # which synchronises always
        assert not program.collectives([program.entry], branches=False)


def bytes_of_a_sync_step(name):
    """What one replica is said to have sent on a sync step that follows a local one."""
    (state, batch), step = prepare(name)[1], compiled(name)
    before = {"bytes": 0, "syncs": 0}
    for _ in range(MANY):
        state, _ = step(state, batch)
        after = metrics.read(state[1])
        if after["syncs"] > before["syncs"]:
            return after["bytes"] - before["bytes"]
        before = after
    raise AssertionError("no sync")


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_sync_sends_the_bytes_that_metrics_count(name):
    program = program_of(name, due=None if name in VOTING else True)
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
    others = REPLICAS - 1  # to each of which goes the weight
    expected = 2 * others / REPLICAS * (total + vote) + others * 4
    assert bytes_of_a_sync_step(name) == pytest.approx(expected, abs=1)


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
    synchronizer, mesh = synchronizers.reconcile(**options), cd.replicas.make_mesh(2)
    tx = sgd(mesh, triggers.every_k(5), synchronizer)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    step = jax.jit(helpers.train_step(tx), donate_argnums=0)
    program = hlo.parse(step.lower(state, batch).compile().as_text())
    copied = [
        x.bytes for x in program.computations[program.entry] if x.opcode == "copy"
    ]
    sizes = [x.nbytes for x in helpers.make_params().values()]
    # The CPU compiler copies the new parameters out of `params + updates`, with or
    # without syncs; and there are counters.
    assert sum(x for x in copied if x >= min(sizes)) <= 2 * sum(sizes)


@pytest.mark.slow
def test_replicas_of_two_devices_send_each_other_one_integer():
    """Two replicas of two devices, {0, 1} and {2, 3}, the matrices split over them."""
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    specs = {
        name: PartitionSpec("fsdp") if name in helpers.MATRICES else PartitionSpec()
        for name in helpers.SHAPES
    }
    tx = helpers.averaging_dion(mesh=mesh, specs=specs)
    params = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name]))
        for name, x in helpers.make_params().items()
    }
    state = helpers.start(tx, params, mesh)
    batch = jax.tree.map(jnp.ones_like, state[0])
    step = jax.jit(helpers.train_step(tx))
    program = hlo.parse(step.lower(state, batch).compile().as_text())

    def across(names, branches=True):
        return [
            instruction
            for instruction in program.collectives(names, branches)
            if not all(
                set(group) <= {0, 1} or set(group) <= {2, 3}
                for group in instruction.groups
            )
        ]

    (flag,) = across([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = [x for x in program.conditionals() if across(x.called)]
    local, sync = sorted((across([x]) for x in conditional.called), key=len)
    assert local == []
    assert sync
    # Within the replica the local step in front does communicate.
    assert len(program.collectives([program.entry], branches=False)) > 1


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("due", [True, False, np.True_, np.False_])
def test_the_caller_may_say_what_a_step_is(due, kind):
    """In place of the trigger; a vote is not needed."""
    mesh = helpers.mesh_of(kind, 2)
    tx = cd.presets.local_sgd(0.1, 3, mesh=mesh)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, 2)
    step = jax.jit(helpers.train_step(tx), static_argnames="due")
    for index in range(3):
        (params, opt_state), _ = step(state, batch, due=due)
        state = params, opt_state
        assert int(opt_state.counters.syncs) == (index + 1) * bool(due)
        equal = np.allclose(params["tall"][0], params["tall"][1], atol=1e-6)
        assert equal == bool(due)
    assert int(opt_state.counters.votes) == 0


@pytest.mark.parametrize(
    "name", helpers.slow_but(["sgd"], ["sgd", "local_muon", "averaging_dion", "paper"])
)
@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_another_replicas_gradient_changes_nothing_until_the_sync(name, kind):
    """Three replicas, four steps, of which 1 and 2 are local; one gradient differs."""
    changed_one, kept = 1, [0, 2]
    trigger = triggers.relative_momentum_change(1e6)
    mesh = helpers.mesh_of(kind, 3)
    tx = {
        "sgd": lambda: sgd(mesh, trigger),
        "local_muon": lambda: cd.local_muon(0.1, mesh=mesh, trigger=trigger),
        "averaging_dion": lambda: helpers.averaging_dion(
            0.1, 0.5, mesh=mesh, trigger=trigger
        ),
        "paper": lambda: cd.presets.paper(0.1, 1e6, mesh=mesh),
    }[name]()
    gradients = helpers.make_gradients(4, 3)
    gradients[3]["tall"] *= 1e9  # the last step synchronises
    other = [jax.tree.map(np.copy, tree) for tree in gradients]
    for array in other[1].values():
        array[changed_one] *= -3
    runs = [
        list(helpers.run(tx, mesh, helpers.make_params(), each))
        for each in (gradients, other)
    ]
    for run in runs:
        assert helpers.decisions(run) == [True, False, False, True]
    for one, two in [*zip(*runs, strict=True)][1:3]:
        helpers.assert_bitwise(
            *(
                jax.tree.map(lambda x: x[kept], (params, state.inner_state))
                for params, state in (one, two)
            )
        )
        for key in helpers.MATRICES:
            assert (one[0][key][changed_one] != two[0][key][changed_one]).all()
    if name != "paper":  # whose sync knows gradients alone
        (one, _), (two, _) = (run[-1] for run in runs)
        assert (one["tall"][kept] != two["tall"][kept]).any()
