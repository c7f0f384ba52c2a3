"""A local step sends nothing, or one integer where replicas vote: seen in programs."""

import functools

import helpers
import hlo
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

REPLICAS = 4
# Steps within which every optimizer here synchronises.
MANY = 40


def sgd(trigger, synchronizer=None, **where):
    synchronizer = synchronizer or synchronizers.reconcile()
    return cd.adaptive_sync(optax.sgd(0.1, 0.9), trigger, synchronizer, **where)


def with_every_part(**where):
    """Combined triggers, an outer optimizer, something before."""
    change = triggers.relative_momentum_change(optax.linear_schedule(0.3, 0.1, 9))
    return helpers.synced_dion(
        0.1,
        0.25,
        triggers.at_least_every(change, 9),
        synchronizers.reconcile(optax.adam(0.1)),
        before=optax.clip_by_global_norm(1.0),
        **where,
    )


# The number of the step decides.
SCHEDULED = {
    "local_muon": functools.partial(cd.local_muon, 0.1, budget=0.2, bits=2),
    "local_sgd": functools.partial(cd.presets.local_sgd, 0.1, k=3),
    "diloco": functools.partial(cd.presets.diloco, 0.1, k=3),
    "muloco": functools.partial(cd.presets.muloco, 0.1, k=3),
    "gradients": functools.partial(
        sgd, triggers.every_k(3), synchronizers.average_gradients()
    ),
    "factors": functools.partial(
        helpers.synced_dion,
        0.1,
        0.25,
        triggers.every_k(3),
        synchronizers.average_factors(),
    ),
}
# Replicas vote on every step, or on every third one.
VOTING = {
    "curvadion": functools.partial(cd.curvadion, 0.1),
    "at_intervals": functools.partial(cd.curvadion, 0.1, decision_interval=3),
    "averaging_dion": functools.partial(helpers.averaging_dion, 0.1),
    "paper": functools.partial(cd.presets.paper, 0.1),
    "authors_code": functools.partial(cd.presets.authors_code, 0.1),
    "every-part": with_every_part,
}
OPTIMIZERS = SCHEDULED | VOTING
IN_CODES = ("curvadion", "at_intervals", "local_muon")
QUICK = ("local_sgd", "curvadion")
MESH = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
(BATCH,) = helpers.make_gradients(1, REPLICAS)


@functools.cache
def prepare(name: str, due: bool | None = None):
    """A step, due or not if that is known, and the state that it is given."""
    tx = helpers.when(OPTIMIZERS[name](mesh=MESH), due)
    return helpers.train_step(tx), helpers.start(tx, helpers.make_params(), MESH)


@functools.cache
def sent(name: str, due: bool | None = None) -> cd.replicas.Audit:
    step, state = prepare(name, due)
    return cd.replicas.audit(step, MESH, state, BATCH)


@pytest.mark.parametrize("name", helpers.slow_but([*QUICK, "at_intervals"], OPTIMIZERS))
def test_a_local_step_sends_nothing_or_one_integer(name):
    kinds = lambda messages: [(x.kind, x.arrays) for x in messages]
    vote = [("all-reduce", "s32[]")] if name in VOTING else []
    # Between votes nothing is sent either.
    expected = ([], vote) if name == "at_intervals" else (vote, [])
    assert (kinds(sent(name).every_step), kinds(sent(name).vote)) == expected


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_sync_sends_codes_or_one_mean_and_a_number_of_each_replica(name):
    messages = [(x.kind, x.arrays) for x in sent(name).sync]
    number = ("all-gather", f"f32[{REPLICAS}]")
    messages.remove(number)
    if name in IN_CODES:
        assert {kind for kind, _ in messages} == {"all-to-all", "all-gather"}
        assert all("u8[" in x and "f32" not in x for _, x in messages)
    else:
        assert {kind for kind, _ in messages} == {"all-reduce"}
        assert {arrays.partition("[")[0][-3:] for _, arrays in messages} == {"f32"}
        # Dion's factors P are averaged before R is made of them.
        assert len(messages) == (2 if name == "factors" else 1)


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_sync_sends_the_bytes_that_metrics_count(name):
    sizes = [(x.kind, x.arrays, x.bytes) for x in sent(name).sync]
    sizes.remove(("all-gather", f"f32[{REPLICAS}]", 4 * REPLICAS))
    total = sum(size for *_, size in sizes)
    if name in IN_CODES:
        # Two stages of codes. Every array is a block, and these four are padded to
        # one for each replica.
        total *= len(helpers.SHAPES) / REPLICAS / 2
    share = 2 * (REPLICAS - 1) / REPLICAS
    vote = 4 * share if name in VOTING else 0
    step, state = prepare(name)
    step = helpers.quick(jax.jit(step), state, BATCH)
    for _ in range(MANY):
        state, _ = step(state, BATCH)
    report = cd.metrics.read(state[1])
    of_sync = total * share + 4 * (REPLICAS - 1)
    assert report["syncs"] > 0
    expected = report["syncs"] * of_sync + report["votes"] * vote
    assert report["bytes"] == round(expected)


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, OPTIMIZERS))
def test_a_step_that_is_not_due_sends_nothing_and_has_no_sync(name):
    assert sent(name, False) == cd.replicas.Audit([], [], [])
    step, state = prepare(name, False)
    found = helpers.quick(jax.jit(step), state, BATCH)
    program = hlo.parse(found.as_text())
    assert not program.collectives([program.entry])
    (_, opt_state), _ = found(state, BATCH)
    report = cd.metrics.read(opt_state)
    assert (report["steps"], report["syncs"], report["votes"]) == (1, 0, 0)


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, SCHEDULED))
def test_a_step_that_is_due_sends_what_a_sync_sends(name):
    """Codes on the condition that somebody takes part, all else without one."""
    program = sent(name, True)
    assert all(x.kind != "all-reduce" for x in program.sync)
    messages = {(x.kind, x.arrays) for x in program.every_step + program.sync}
    assert messages == {(x.kind, x.arrays) for x in sent(name).sync}
    step, state = prepare(name, True)
    step = helpers.quick(jax.jit(step), state, BATCH)
    (_, opt_state), _ = step(state, BATCH)
    report = cd.metrics.read(opt_state)
    assert (report["syncs"], report["votes"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local_muon", "gradients"])
def test_two_programs_train_as_one(name):
    """Of local steps and of syncs, and where the program itself decides."""
    step, state = prepare(name)
    one = other = state
    whole = helpers.quick(jax.jit(step), state, BATCH)
    parts = {
        due: helpers.quick(jax.jit(prepare(name, due)[0]), state, BATCH)
        for due in (False, True)
    }
    for _ in range(7):
        one, _ = whole(one, BATCH)
        due = int(one[1].counters.since) == 0
        other, _ = parts[due](other, BATCH)
    assert int(one[1].counters.syncs) > 0
    np.testing.assert_array_equal(one[1].counters.checksum, other[1].counters.checksum)


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
    tx = sgd(triggers.every_k(5), synchronizers.reconcile(**options), mesh=MESH)
    state = helpers.start(tx, helpers.make_params(), MESH)
    step = jax.jit(helpers.train_step(tx), donate_argnums=0)
    program = hlo.parse(step.lower(state, BATCH).compile().as_text())
    copied = [
        x.bytes for x in program.computations[program.entry] if x.opcode == "copy"
    ]
    sizes = [x.nbytes for x in helpers.make_params().values()]
    counters = [x.nbytes for x in jax.tree.leaves(state[1].counters)]
    # The CPU compiler copies the new parameters out of `params + updates`, with or
    # without syncs; and there are counters, some of which are copied twice.
    assert sum(x for x in copied if x >= min(sizes)) <= 2 * sum(sizes)
    assert sum(x for x in copied if x < min(sizes)) <= 2 * sum(counters)


@pytest.mark.parametrize(
    "name", helpers.slow_but(["local_sgd"], ["local_sgd", "averaging_dion", "paper"])
)
def test_another_replicas_gradient_changes_nothing_until_the_sync(name):
    """Three replicas, four steps, of which 1 and 2 are local; one gradient differs."""
    changed_one, kept = 1, [0, 2]
    trigger = triggers.relative_momentum_change(1e6)
    make = {
        "local_sgd": lambda mesh: sgd(trigger, mesh=mesh),
        "averaging_dion": lambda mesh: helpers.averaging_dion(
            0.1, 0.5, trigger=trigger, mesh=mesh
        ),
        "paper": lambda mesh: cd.presets.paper(0.1, threshold=1e6, mesh=mesh),
    }[name]
    gradients = helpers.make_gradients(4, 3)
    gradients[3]["tall/kernel"] *= 1e9  # the last step synchronises
    other = [jax.tree.map(np.copy, tree) for tree in gradients]
    for array in other[1].values():
        array[changed_one] *= -3
    runs = [
        list(helpers.run_mesh(make, helpers.make_params(), each))
        for each in (gradients, other)
    ]
    for run in runs:
        assert helpers.decisions(run) == [True, False, False, True]
    for one, two in [*zip(*runs, strict=True)][1:3]:
        rows = [
            jax.tree.map(lambda x: x[kept], (state[0], state[1].rows.inner_state))
            for state in (one, two)
        ]
        helpers.assert_bitwise(*rows)
        for key in helpers.MATRICES:
            assert (one[0][key][changed_one] != two[0][key][changed_one]).all()
    if name != "paper":  # whose sync knows gradients alone
        (one, _), (two, _) = (run[-1] for run in runs)
        assert (one["tall/kernel"][kept] != two["tall/kernel"][kept]).any()
