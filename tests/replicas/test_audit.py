"""`audit` names what a compiled step sends between replicas, and when."""

import functools
from types import SimpleNamespace

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax.replicas._audit import groups_of, read_program

REPLICAS = 4
MESH = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
(GRADIENTS,) = helpers.make_gradients(1, REPLICAS)
NORM = optax.clip_by_global_norm(1.0)


def local_sgd(**options):
    return cd.presets.local_sgd(0.1, k=2, mesh=MESH, **options)


def audit(tx, wrap=lambda step: step, batch=GRADIENTS):
    state = helpers.start(tx, helpers.make_params(), MESH)
    return cd.replicas.audit(wrap(helpers.train_step(tx)), MESH, state, batch)


def kinds(messages):
    return sorted((x.kind, x.arrays) for x in messages)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_nnx_changes_in_place_is_part_of_the_program(compiled):
    """The step returns nothing; the trap of clipping around the optimizer is seen."""
    tx = optax.chain(NORM, local_sgd())
    model = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    model = nnx.merge(graph, cd.replicas.replicate(state, MESH))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.state(model, nnx.Param))

    if compiled:
        found = cd.replicas.audit(step.lower(model, optimizer).compile(), MESH)
    else:
        found = cd.replicas.audit(step, MESH, model, optimizer)
    assert [x.kind for x in found.every_step] == ["all-reduce"]
    assert len(found.sync) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_under_filter_jit_is_audited(compiled):
    """Equinox's compiled step is an object around JAX's."""
    tx = local_sgd()
    state = helpers.start(tx, helpers.make_params(), MESH)
    step = eqx.filter_jit(helpers.train_step(tx))
    if compiled:
        found = cd.replicas.audit(step.lower(state, GRADIENTS).compile(), MESH)
    else:
        found = cd.replicas.audit(step, MESH, state, GRADIENTS)
    assert found.every_step == []
    assert kinds(found.sync) == SYNC


class Trainer:
    """Its method is jitted, with the object and a flag as static arguments."""

    def __init__(self, tx):
        self.tx = tx

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def step(self, state, gradients, flag):
        assert flag is True
        return helpers.train_step(self.tx)(state, gradients)

    def plain(self, state, gradients, flag):
        return helpers.train_step(self.tx)(state, gradients)


class NnxTrainer(nnx.Module):
    """Its method changes the module in place."""

    def __init__(self, tx, state):
        self.tx, self.state = tx, nnx.data(jax.tree.map(nnx.Variable, state))

    @nnx.jit
    def step(self, gradients):
        state = jax.tree.map(lambda x: x[...], self.state, is_leaf=is_variable)
        state, _ = helpers.train_step(self.tx)(state, gradients)
        set_value = lambda variable, x: variable.set_value(x)
        jax.tree.map(set_value, self.state, state, is_leaf=is_variable)


def is_variable(x):
    return isinstance(x, nnx.Variable)


class EquinoxTrainer(eqx.Module):
    tx: optax.GradientTransformation = eqx.field(static=True)

    @eqx.filter_jit
    def step(self, state, gradients):
        return helpers.train_step(self.tx)(state, gradients)


@pytest.mark.parametrize("kind", ["static", "plain", "nnx", "equinox", "partial"])
def test_methods_and_partials_are_audited(kind):
    """What they bind is an argument, and no constant that a sync depends on."""
    tx = local_sgd()
    state = helpers.start(tx, helpers.make_params(), MESH)
    step, arguments = {
        "static": lambda: (Trainer(tx).step, (state, GRADIENTS, True)),
        "plain": lambda: (Trainer(tx).plain, (state, GRADIENTS, True)),
        "nnx": lambda: (NnxTrainer(tx, state).step, (GRADIENTS,)),
        "equinox": lambda: (EquinoxTrainer(tx).step, (state, GRADIENTS)),
        "partial": lambda: (
            functools.partial(jax.jit(helpers.train_step(tx)), state),
            (GRADIENTS,),
        ),
    }[kind]()
    found = cd.replicas.audit(step, MESH, *arguments)
    assert found.every_step == []
    assert kinds(found.sync) == SYNC


SYNC = kinds(audit(local_sgd()).sync)


def test_a_clean_step_sends_nothing_but_a_sync():
    found = audit(local_sgd())
    assert found.every_step == []
    sizes = ",".join  # of the parameters, in one all-reduce
    shapes = [f"f32[{sizes(map(str, x))}]" for x in helpers.SHAPES.values()]
    (weights, mean) = sorted(found.sync)
    assert (weights.kind, weights.arrays, weights.bytes) == ("all-gather", "f32[4]", 16)
    assert (mean.kind, mean.arrays) == ("all-reduce", ", ".join(shapes))
    assert mean.bytes == 4 * 74
    assert "psum" in mean.origin
    lines = str(found).splitlines()
    assert lines[0] == "every step  nothing"
    assert len(lines) == 3
    assert all(line.startswith("sync        all-") for line in lines[1:])


@pytest.mark.parametrize(
    "tx",
    [
        local_sgd(before=NORM),
        optax.chain(cd.replicas.lift(NORM, MESH), local_sgd()),
        optax.chain(optax.clip(1.0), local_sgd()),
    ],
    ids=["before", "lift", "elementwise"],
)
def test_a_transformation_of_one_replica_sends_nothing(tx):
    found = audit(tx)
    assert found.every_step == []
    assert kinds(found.sync) == SYNC


def test_a_norm_of_all_replicas_is_named():
    """The trap: it clips by the norm over all replicas, and sends a number."""
    found = audit(optax.chain(NORM, local_sgd()))
    assert found.every_step
    assert {
        (x.kind, x.arrays.split("[")[0].split(" x ")[-1]) for x in found.every_step
    } == {("all-reduce", "f32")}
    assert sum(x.bytes for x in found.every_step) <= 4 * len(helpers.SHAPES)
    assert kinds(found.sync) == SYNC
    lines = [x for x in str(found).splitlines() if x.startswith("every step")]
    assert len(lines) == len(found.every_step)
    assert all("all-reduce" in line and "f32[" in line for line in lines)


def test_a_mean_of_metrics_is_named():
    def with_mean(step):
        def train(state, batch):
            state, _ = step(state, batch)
            return state, cd.replicas.map(lambda x: jnp.sum(x["tall/kernel"]), MESH)(
                batch
            ).mean()

        return train

    found = audit(local_sgd(), with_mean)
    assert kinds(found.every_step) == [("all-reduce", "f32[]")]
    assert kinds(found.sync) == SYNC


def test_a_vote_is_named():
    found = audit(cd.curvadion(0.1, mesh=MESH))
    assert kinds(found.every_step) == [("all-reduce", "s32[]")]
    assert found.sync


def scanned(step):
    stacked = lambda batch: jax.tree.map(lambda x: jnp.stack([x] * 3), batch)
    return lambda state, batch: lax.scan(step, state, stacked(batch))


@pytest.mark.parametrize(
    "wrap", [scanned, jax.jit, lambda step: jax.jit(scanned(step))]
)
@pytest.mark.parametrize("before", [(), (NORM,)], ids=["clean", "norm"])
def test_steps_in_a_loop_are_seen_through(wrap, before):
    found = audit(optax.chain(*before, local_sgd()), wrap)
    assert bool(found.every_step) == bool(before)
    assert kinds(found.sync) == SYNC


def test_multisteps_sends_nothing_outside_of_a_sync():
    """It holds the update in a condition of its own, around the sync's."""
    tx = optax.MultiSteps(local_sgd(), 3).gradient_transformation()
    found = audit(tx)
    assert found.every_step == []
    assert kinds(found.sync) == SYNC


def test_a_convolution_under_vmap_is_named():
    """It becomes a grouped one, whose operands XLA gathers; in `map` it does not."""
    convolve = lambda x, w: lax.conv(x, w, (1, 1), "SAME")
    loss = lambda w, x: jnp.sum(convolve(x, w) ** 2)
    w = cd.replicas.replicate(jnp.ones((2, 3, 3, 3)), MESH)
    x = cd.replicas.split(np.ones((8, 3, 4, 4), np.float32), MESH)
    found = cd.replicas.audit(jax.vmap(jax.grad(loss)), MESH, w, x)
    assert {x.kind for x in found.every_step} >= {"all-gather"}
    clean = cd.replicas.audit(cd.replicas.map(jax.grad(loss), MESH), MESH, w, x)
    assert clean == cd.replicas.Audit([], [], [])


def test_what_moves_inside_a_replica_is_not_named():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2}, devices=jax.devices()[:4])
    x = jax.device_put(jnp.ones((2, 8)), NamedSharding(mesh, P("replica", "fsdp")))
    inside = cd.replicas.audit(lambda x: x - x.mean(1, keepdims=True), mesh, x)
    assert inside == cd.replicas.Audit([], [], [])
    across = cd.replicas.audit(lambda x: x.mean(0), mesh, x)
    assert kinds(across.every_step) == [("all-reduce", "f32[4]")]


def test_the_step_is_not_run_and_its_arguments_stay():
    calls = []
    state = cd.replicas.replicate(jnp.ones(3), MESH)

    def step(state):
        jax.debug.callback(calls.append, 0)
        return 2 * state

    cd.replicas.audit(jax.jit(step, donate_argnums=0), MESH, state)
    assert calls == []
    assert (state == 1).all()


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.apply_if_finite(optax.chain(NORM, tx), 5),
        lambda tx: optax.chain(optax.scale_by_novograd(), tx),
    ],
    ids=["apply_if_finite", "novograd"],
)
def test_what_another_condition_sends_is_no_sync(around):
    """Both branches of novograd's condition take norms over all replicas."""
    tx = around(cd.local_muon(0.1, mesh=MESH))
    rows = cd.replicas.replicate({"kernel": jnp.ones((4, 4))}, MESH)
    found = cd.replicas.audit(tx.update, MESH, rows, tx.init(rows), rows)
    assert "f32[]" in {x.arrays for x in found.every_step}
    assert "f32[]" not in {x.arrays for x in found.sync}
    assert any(x.arrays.startswith("u8") for x in found.sync)


@pytest.mark.parametrize(
    ("mesh", "kind"), [(None, "one replica"), (cd.replicas.simulated(2), "simulated")]
)
def test_without_devices_nothing_is_sent(mesh, kind):
    found = cd.replicas.audit(lambda x: x, mesh, jnp.ones(2))
    assert str(found) == f"{kind}: nothing is sent"
    assert found == ([], [], [])


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match=r"mesh must be .* got 2"):
        cd.replicas.audit(lambda x: x, 2, 1)


QUIET = "  %a = f32[] add(%x, %x)"
LOUD = "  %b = f32[] all-gather(%x), dimensions={0}"  # calls nothing itself
BOTH = "  %c = f32[] custom-call(%x), called_computations={%quiet, %loud}"
UNHEARD = "  %c = f32[] custom-call(%x), of_tomorrow={%loud}"
CALL = "  %d = f32[] call(%x), to_apply=%loud"
CONDITION = "  %e = f32[] conditional(%p, %x), branch_computations={%quiet, %branch}"
OURS = f'{CONDITION}, metadata={{op_name="jit(f)/while/body/curvadion_sync/cond"}}'
LOCAL = OURS.replace("%quiet, %branch", "%branch, %quiet")
OF_BOOL = OURS.replace(
    "branch_computations={%quiet, %branch}",
    "true_computation=%branch, false_computation=%quiet",
)
# A condition in the local branch: its name contains the sync's.
AROUND = OURS.replace("{%quiet, %branch}", "{%within, %quiet}")
WITHIN = OURS.replace("/cond", "/cond/branch_0_fun/cond")
VOTE = OURS.replace("curvadion_sync", "curvadion_vote")


@pytest.mark.parametrize(
    ("entry", "branch", "when"),
    [
        pytest.param([BOTH], [], "every_step", id="the second of two"),
        pytest.param([OURS], [BOTH], "sync", id="the second of two in a branch"),
        pytest.param([VOTE], [CALL], "vote", id="in the branch of a vote"),
        pytest.param([UNHEARD], [], "every_step", id="called in an unknown way"),
        pytest.param([OURS], [UNHEARD], "every_step", id="unknown in a branch"),
        pytest.param([CALL, OURS], [CALL], "every_step", id="in a branch too"),
        pytest.param([CONDITION], [CALL], "every_step", id="in a branch of another"),
        pytest.param([LOCAL], [CALL], "every_step", id="in the local branch"),
        pytest.param([AROUND], [CALL], "every_step", id="in a branch of that"),
        pytest.param([OF_BOOL], [CALL], "sync", id="as XLA writes it of bool"),
    ],
)
def test_what_is_sent_is_found_by_who_calls_it(entry, branch, when):
    """Once, and on every step where that cannot be told."""
    programs = {"quiet": [QUIET], "loud": [LOUD], "branch": branch}
    programs |= {"within": [WITHIN] if entry == [AROUND] else [], "ENTRY main": entry}
    text = "\n".join(
        line
        for name, lines in programs.items()
        for line in (f"{name.replace(' ', ' %')} (x: f32[]) -> f32[] {{", *lines, "}")
    )
    found = read_program(text, np.arange(2))._asdict()
    assert [x.kind for x in found.pop(when)] == ["all-gather"]
    assert [*found.values()] == [[], []]


def test_a_program_without_text_is_refused():
    """JAX gives None where a backend has none."""
    compiled = SimpleNamespace(as_text=lambda: None)
    with pytest.raises(ValueError, match=r"no text of its program"):
        cd.replicas.audit(compiled, cd.replicas.make_mesh(2))


F32, PAIR = "f32[4]{0}", "f32[4]{0}, f32[6]{0}"


@pytest.mark.parametrize(
    ("result", "kind", "size"),
    [
        (F32, "all-reduce", 16),
        (f"({PAIR})", "all-reduce", 40),
        (F32, "all-reduce-start", 16),
        (f"({PAIR})", "all-reduce-start", 40),
        (f"({F32}, f32[8]{{0}})", "all-gather-start", 32),
        (f"(({PAIR}), (f32[8]{{0}}, f32[12]{{0}}))", "all-gather-start", 80),
        (f"(({PAIR}), {F32}, s32[])", "reduce-scatter-start", 16),
        ("(u32[], u32[], u32[], u32[])", "collective-permute-start", 4),
        # As libtpu 0.0.52 has it.
        (
            "(f32[1,512,128]{2,1,0:T(8,128)}, f32[1,512,128]{2,1,0:T(8,128)S(1)}, "
            "u32[]{:S(2)}, u32[]{:S(2)})",
            "collective-permute-start",
            262_144,
        ),
    ],
)
def test_bytes_are_those_of_the_result(result, kind, size):
    """What begins in the background has its operands in its type, and contexts."""
    line = f"  %a = {result} {kind}(%x), replica_groups={{{{0,1}}}}"
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n{line}\n}}"
    (found,) = read_program(text, np.arange(2)).every_step
    assert found.bytes == size


PER_DEVICE = "{{100000,%s00000},{100001,%s00001},{%s00000,400000},{%s00001,400001}}"


BY_SLICE, STRADDLING = np.repeat([0, 1], 4), np.repeat([0, 1], [3, 5])


@pytest.mark.parametrize(
    ("target", "kind", "slices", "replica", "found"),
    [
        (PER_DEVICE % (3, 3, 2, 2), "ALL_REDUCE", (0, 1, 2, 3), BY_SLICE, True),
        (PER_DEVICE % (2, 2, 3, 3), "ALL_REDUCE", (0, 1, 2, 3), BY_SLICE, False),
        # The mesh has the slices in another order.
        (PER_DEVICE % (3, 3, 2, 2), "ALL_REDUCE", (0, 2, 1, 3), BY_SLICE, False),
        (PER_DEVICE % (2, 2, 3, 3), "ALL_REDUCE", (0, 2, 1, 3), BY_SLICE, True),
        (PER_DEVICE % (2, 2, 3, 3), "ALL_REDUCE", (0, 1, 2, 3), STRADDLING, True),
        ("{{100001->300000},{300001->100000}}", "A", (0, 1, 2, 3), BY_SLICE, True),
        ("{{100001->200000},{300001->400000}}", "A", (0, 1, 2, 3), BY_SLICE, False),
        ('"{1,2,3,4}x{0:1}"', "A_B", (0, 1, 2, 3), BY_SLICE, True),
        ('"{1,2}x{0:1}"', "A_B", (0, 1, 2, 3), BY_SLICE, False),
        # Unknown: written otherwise, or of slices that the mesh has not.
        ("of tomorrow", "A", (0, 1, 2, 3), BY_SLICE, True),
        ("{{500000,600000}}", "A", (0, 1, 2, 3), BY_SLICE, True),
        ("{{0,100000}}", "A", (0, 1, 2, 3), BY_SLICE, True),
    ],
)
def test_what_slices_of_tpus_send_by_their_runtime_is_named(
    target, kind, slices, replica, found
):
    """Two replicas on four slices of two devices. Text of libtpu 0.0.42."""
    attributes = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="pmax.7_0",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    )
    shape = "(s32[1,1,128]{2,1,0:T(1,128)}, u32[]{:S(2)}, token[])"
    rest = f"is_host_transfer=true, frontend_attributes={{{attributes}}}"
    text = f"""HloModule jit_f, is_scheduled=true
ENTRY %main (x: s32[1,1,128]) -> s32[1,1,128] {{
  %send = {shape} send(%x, %after-all), channel_id=2, {rest}
  %recv = {shape} recv(%after-all), channel_id=1, {rest}
  %print = {shape} recv(%after-all), channel_id=3, is_host_transfer=true
}}"""
    every_step = read_program(text, replica, np.repeat(slices, 2).tolist()).every_step
    described = [(x.kind, x.bytes, x.origin) for x in every_step]
    assert described == [(kind.lower().replace("_", "-"), 512, "pmax.7_0")] * found


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2,'c'=1] {'c','a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_devices_that_a_collective_joins(written, groups):
    """As versions of XLA write them."""
    assert groups_of(f"channel_id=1, replica_groups={written}") == groups
