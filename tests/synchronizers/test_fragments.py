"""Fragments of `reconcile`: what a sync of each sends, and where they lie."""

import itertools

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_offload
from flax import nnx
from test_streaming import ATOL, close, optimizer

import curvadion_jax as cd
from curvadion_jax import _partition, compressors, metrics, synchronizers, triggers

pytestmark = pytest.mark.slow

AXIS = helpers.AXIS


def payloads_of(synchronizer, params, inner_state, number):
    """Of a sync of every variant."""
    views = _partition.matrix_views(params)
    return [
        synchronizer.payload(params, inner_state, views, variant)
        for variant in range(number)
    ]


def program_of(tx, params, replicas=8):
    mesh = cd.replicas.make_mesh(replicas)
    state = helpers.start(tx, params, mesh)
    batch = jax.tree.map(np.asarray, state[0])
    step = helpers.replica_step(tx, mesh)
    return hlo.parse(step.lower(state, batch).compile().as_text())


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        # Parameters and momenta of tall and embed, of wide and bias.
        pytest.param({"fragments": 2}, [45 + 24, 29 + 24], id="fragments"),
        pytest.param({"momentum_every": 3}, [74, 74 + 48], id="momentum_every"),
        pytest.param(
            {"fragments": 2, "momentum_every": 2, "other_state": True},
            # AdamW's two moments of embed and bias go with the momentum.
            [45, 29, 45 + 24 + 42, 29 + 24 + 10],
            id="all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_sync_sends_its_own_part_alone(options, elements):
    synchronizer = synchronizers.reconcile(**options)
    tx = helpers.synced_dion(
        *(0.1, 0.25, triggers.every_k(2), synchronizer),
        axis_name=AXIS,
        orthonormalize=helpers.householder_qr,
    )
    program = program_of(tx, helpers.make_params())
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    sent = [
        sum(x.bytes for x in program.collectives([branch]) if x.shape[:6] != "f32[8]")
        for branch in conditional.called
    ]
    assert sent == [0, *(4 * number for number in elements)]
    inner_state = tx.init(helpers.make_params()).inner_state
    found = payloads_of(synchronizer, helpers.make_params(), inner_state, len(elements))
    assert found == [compressors.Payload(averaged=4 * number) for number in elements]


def test_the_payload_of_a_compressed_fragment():
    # tall and embed in blocks of 4 + 4 bytes, wide and bias.
    synchronizer = synchronizers.reconcile(
        compressor=compressors.quantize(8, 4), momentum=False, fragments=2
    )
    found = payloads_of(synchronizer, helpers.make_params(), (), 2)
    assert [payload.averaged for payload in found] == [8 * (6 + 6), 8 * (6 + 2)]
    assert not any(payload.gathered for payload in found)


def test_one_fragment_every_time_is_what_reconcile_was():
    plain, said = (
        synchronizers.reconcile(**options)
        for options in ({}, {"fragments": 1, "momentum_every": 1})
    )
    assert plain.cycle == said.cycle == (0,)
    cycles = [
        synchronizers.reconcile(fragments=n, momentum_every=k).cycle
        for n, k in ((3, 1), (1, 3), (2, 3))
    ]
    assert cycles == [(0, 1, 2), (0, 0, 1), (0, 1, 0, 1, 2, 3)]


def test_an_offloaded_fragment_goes_back_alone():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    outer = optax.sgd(1.0, momentum=0.5)
    tx = optimizer(outer=outer, momentum=False, fragments=2)
    mesh = cd.replicas.make_mesh(2)
    device = helpers.start(tx, params, mesh)
    host = cd.replicas.offload(device)
    step = helpers.replica_step(tx, mesh)
    program = jax.make_jaxpr(step)(host, device[0]).jaxpr
    outside, conditionals = test_offload.transfers(program)
    counts = [
        [test_offload.transfers(branch)[0] for branch in branches]
        for branches in conditionals
    ]
    # At a sync two anchors and two traces come, of which one each goes back.
    moving = [pair for pair in counts if any(pair)]
    assert (outside, moving) == (0, [[0, 4 + 2, 4 + 2]])
    gradients = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), params)
    for _ in range(3):
        device, host = step(device, gradients)[0], step(host, gradients)[0]
    helpers.assert_bitwise(host, device)
    assert test_offload.kinds(host[1].sync_state) == test_offload.HOST


def test_a_resumed_run_goes_on_with_the_next_fragment(tmp_path):
    inner = optax.sgd(0.1, 0.9)
    options = {"compressor": compressors.quantize(4), "momentum_every": 2}
    options |= {"outer": optax.sgd(0.7, 0.9, nesterov=True), "fragments": 2}
    tx = optimizer(inner, **options)
    mesh = cd.replicas.make_mesh(2)
    start = helpers.start(tx, helpers.make_params(), mesh)
    step = helpers.replica_step(tx, mesh)
    gradients, state = helpers.make_gradients(6, 2), start
    for tree in gradients[:3]:
        state, _ = step(state, tree)
    cd.checkpoint.save(tmp_path, 3, state)
    restored = cd.checkpoint.restore(tmp_path, start)
    for tree in gradients[3:]:
        state, restored = step(state, tree)[0], step(restored, tree)[0]
    helpers.assert_bitwise(restored, state)
    # Six syncs, of variants 0, 1, 2, 3 and 0, 1 again; flags and weights.
    params = helpers.make_params()
    payloads = payloads_of(
        synchronizers.reconcile(**options), params, inner.init(params), 4
    )
    turns = zip((2, 2, 1, 1), payloads, strict=True)
    sent = sum(number * payload.averaged for number, payload in turns)
    assert len({payload.averaged for payload in payloads}) == 4
    assert state[1].metrics.sent.tolist() == [[[0, sent + 6 * 4], [0, 6 * 4]]] * 2


def test_an_nnx_model_in_fragments():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, rngs=rngs)
            self.down = nnx.Linear(6, 2, rngs=rngs)

    model, mesh = Model(nnx.Rngs(0)), cd.replicas.make_mesh(2)
    tx = optimizer(optax.sgd(0.1, 0.9), fragments=2, outer=optax.sgd(0.7, 0.9))
    params = nnx.state(model, nnx.Param)
    assert synchronizers.fragment_paths(params, 2) == [
        ["up/kernel"],
        ["down/bias", "down/kernel", "up/bias"],
    ]
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def train(state, x):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            return jnp.sum(model.down(model.up(x)) ** 2)

        _, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), ()

    state = cd.replicas.replicate(state, mesh)
    step = cd.replicas.step(train, mesh)
    for seed in range(2):
        x = np.random.default_rng(seed).normal(size=(2, 4)).astype(np.float32)
        state, _ = step(state, x)
    model, optimizer_ = nnx.merge(graph, state)
    anchor = cd.replicas.consensus(model, optimizer_.opt_state)
    apart = jax.tree.map(
        lambda x: float(np.std(x, 0).max()), nnx.to_pure_dict(nnx.state(model))
    )
    assert apart["up"]["kernel"] > ATOL  # came together one step before
    assert max(apart["down"]["kernel"], apart["down"]["bias"]) < ATOL
    close(anchor.down.kernel.get_value(), model.down.kernel.get_value()[0])
    counters = metrics.observe(state)
    assert counters.syncs.tolist() == [2, 2]
    # Both fragments once, and momenta: 24 + 6 and 12 + 2 elements.
    sent = 2 * 4 * (24 + 6 + 12 + 2)
    assert counters.sent.tolist() == [[[0, sent + 2 * 4], [0, 2 * 4]]] * 2


@pytest.mark.parametrize("number", [2, 4, 7])
def test_fragments_are_whole_disjoint_and_balanced(number):
    rng = np.random.default_rng(number)
    shapes = {f"p{i}": (int(rng.integers(1, 50)), 3) for i in range(12)}
    params = {name: jax.ShapeDtypeStruct(x, "float32") for name, x in shapes.items()}
    fragments = synchronizers.fragment_paths(params, number)
    assert sorted(itertools.chain(*fragments)) == sorted(params)
    sizes = [sum(np.prod(shapes[name]) for name in names) for names in fragments]
    # Whatever is added goes to the smallest: none exceeds another by more than one.
    assert max(sizes) - min(sizes) <= max(np.prod(shape) for shape in shapes.values())


def test_parameters_of_one_path_are_one_fragment():
    with pytest.raises(ValueError, match="of different paths"):
        synchronizers.fragment_paths({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, 2)
