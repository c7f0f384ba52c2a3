"""`reconcile` in parts: fragments that come together in turn, momentum now and then."""

import itertools
from typing import Any

import helpers
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_offload
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

pytestmark = pytest.mark.slow

AXIS = helpers.AXIS
# Sums of some dozens of float32 numbers of order one. Measured: 2e-6.
ATOL = 2e-5
# Elements of fragments of the helpers' parameters: tall 24, wide 24, embed 21, bias 5.
TWO = [["tall", "embed"], ["wide", "bias"]]


def optimizer(inner=None, k=1, outer=None, **options) -> Any:
    inner = optax.sgd(1.0) if inner is None else inner
    return cd.adaptive_sync(
        inner, triggers.every_k(k), synchronizers.reconcile(outer, **options), AXIS
    )


def same_on_all(array) -> bool:
    return len({row.tobytes() for row in np.asarray(array)}) == 1


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL)


def test_two_fragments_by_hand():
    """Two replicas, SGD of rate 1, outer step of half the drift, a sync every step.

    a has gradients (1, 1) and (3, 5), b 2 and 4; both start at 0. Step 1 brings a
    together: drifts (-1, -1) and (-3, -5), half their mean (-1, -1.5). b stands at -2
    and -4. Step 2 brings b: drifts -4 and -8, half their mean -3; a moved on alone.
    Step 3 brings a: from the anchor (-1, -1.5) drifts (-2, -2), (-6, -10), half their
    mean (-2, -3), so (-3, -4.5); b is at -3 - 2 and -3 - 4.
    """
    tx = optimizer(outer=optax.sgd(0.5), fragments=2, momentum=False)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = {
        "a": np.float32([[1, 1], [3, 5]]),
        "b": np.float32([[2], [4]]),
    }
    history = list(helpers.run_mesh(tx, params, [gradients] * 3))
    got = [(p["a"].tolist(), p["b"].tolist()) for p, _ in history]
    assert got == [
        ([[-1, -1.5]] * 2, [[-2], [-4]]),
        ([[-2, -2.5], [-4, -6.5]], [[-3]] * 2),
        ([[-3, -4.5]] * 2, [[-5], [-7]]),
    ]
    anchors = [state.sync_state.anchor for _, state in history]
    assert [(x["a"].tolist(), x["b"].tolist()) for x in anchors] == [
        ([[-1, -1.5]] * 2, [[0]] * 2),
        ([[-1, -1.5]] * 2, [[-3]] * 2),
        ([[-3, -4.5]] * 2, [[-3]] * 2),
    ]
    model = cd.replicas.consensus(*history[2])
    assert (model["a"].tolist(), model["b"].tolist()) == ([-3, -4.5], [-3])
    assert metrics.read(history[2][1])["bytes"] == 4 * (2 + 1 + 2) + 3 * (4 + 4)


def test_momentum_at_every_third_sync_by_hand():
    # Rate 0, decay 1/2: after steps 1 to 3 the trace of gradient g is g, 3/2 g, 7/4 g;
    # g is 1 and 3, so that the third sync leaves 7/2 on both; then 7/4 + g.
    tx = optimizer(optax.sgd(0.0, 0.5), momentum_every=3)
    gradients = [{"w": np.float32([[1], [3]])}] * 4
    history = helpers.run_mesh(tx, {"w": jnp.zeros(1)}, gradients)
    traces = [state.inner_state[0].trace["w"][:, 0].tolist() for _, state in history]
    assert traces == [[1, 3], [1.5, 4.5], [3.5, 3.5], [2.75, 4.75]]


def program_of(tx, params, replicas=8):
    mesh = cd.replicas.make_mesh(replicas)
    state = helpers.start(tx, params, mesh)
    batch = jax.tree.map(np.asarray, state[0])
    step = helpers.replica_step(tx, mesh)
    return hlo.parse(step.lower(state, batch).compile().as_text()), state


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
    tx = cd.curvadion(
        0.1,
        0.25,
        axis_name=AXIS,
        orthonormalize=cd.householder_qr,
        trigger=triggers.every_k(2),
        synchronizer=synchronizers.reconcile(**options),
    )
    program, (_, state) = program_of(tx, helpers.make_params())
    (flag,) = program.collectives([program.entry], branches=False)
    assert (flag.opcode, flag.shape) == ("all-reduce", "s32[]")
    (conditional,) = program.conditionals()
    sent = [
        sum(x.bytes for x in program.collectives([branch]) if x.shape[:6] != "f32[8]")
        for branch in conditional.called
    ]
    assert sent == [0, *(4 * number for number in elements)]
    words = [[0, 4 * number] for number in elements]
    assert state.metrics.sync_payload[0].tolist() == words


def test_the_payload_of_a_compressed_fragment():
    # tall and embed in blocks of 4 + 4 bytes, wide and bias.
    tx = optimizer(compressor=compressors.quantize(8, 4), momentum=False, fragments=2)
    words = tx.init(helpers.make_params()).metrics.sync_payload.tolist()
    assert words == [[0, 8 * (6 + 6)], [0, 8 * (6 + 2)]]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(compressors.quantize(4, 4), id="int4"),
        pytest.param(compressors.low_rank(1), id="rank1"),
    ],
)
def test_error_feedback_of_fragments_loses_nothing(form):
    """anchor + mean error = start - sum of the mean gradients, as of the last turn."""
    tx = optimizer(optax.sgd(0.1), compressor=form, fragments=2, momentum=False)
    gradients = helpers.make_gradients(5, 3)
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    _, state = history[-1]
    for names, steps in zip(TWO, (5, 4), strict=True):  # turns at steps 1, 3, 5; 2, 4
        for name in names:
            total = sum(tree[name].mean(0) for tree in gradients[:steps])
            anchor, error = (
                getattr(state.sync_state, field)[name] for field in ("anchor", "error")
            )
            assert same_on_all(anchor)
            assert name == "bias" or error.any()
            expected = helpers.make_params()[name] - 0.1 * total
            close(anchor[0] + error.mean(0), expected)


def test_a_compressed_momentum_in_fragments():
    """Means are kept, and only the momenta of a fragment move at its turn."""
    inner = optax.sgd(0.0, 0.5)
    gradients = helpers.make_gradients(2, 3)
    runs = [
        list(helpers.run_vmap(optimizer(inner, **options), params, gradients))
        for params in [helpers.make_params()]
        for options in (
            {"momentum": False},
            {"momentum": compressors.quantize(4, 4), "fragments": 2},
        )
    ]
    for step, (names, others) in enumerate((TWO, TWO[::-1])):
        alone, shared = (run[step][1].inner_state[0].trace for run in runs)
        for name in names:
            close(shared[name].mean(0), alone[name].mean(0))
            assert shared[name].std(0).mean() < alone[name].std(0).mean()
        for name in others if step == 0 else ():
            helpers.assert_bitwise(shared[name], alone[name])


def test_other_state_takes_turns_too():
    tx = optimizer(optax.adamw(0.01), fragments=2, momentum_every=2, other_state=True)
    gradients = helpers.make_gradients(4, 3)
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    for step, (params, state) in enumerate(history):
        turn, with_state = TWO[step % 2], step >= 2
        adam = state.inner_state[0]
        for name in helpers.SHAPES:
            common = name in turn
            assert same_on_all(state.sync_state.anchor[name])
            assert (np.std(params[name], 0).max() < ATOL) == common
            for moments in (adam.mu, adam.nu):
                assert same_on_all(moments[name]) == (common and with_state)


def test_an_outer_schedule_counts_a_fragments_own_turns():
    outer = optax.sgd(optax.exponential_decay(1.0, 1, 0.5))
    tx = optimizer(outer=outer, momentum=False, fragments=2)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), params)
    history = list(helpers.run_vmap(tx, params, [gradients] * 4))
    # a: -1 at step 1, half of -2 at step 3. b: -2 at step 2, half of -2 at step 4.
    anchor = history[-1][1].sync_state.anchor
    assert anchor["a"].tolist() == [[-2, -2]] * 2
    assert anchor["b"].tolist() == [[-3]] * 2


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
    # After a sync its fragment's anchor is looked at. At one two anchors and two traces
    # come, of which one each goes back.
    assert (outside, counts) == (0, [[0, 1, 1], [0, 4 + 2, 4 + 2]])
    gradients = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), params)
    for _ in range(3):
        device, host = step(device, gradients)[0], step(host, gradients)[0]
    helpers.assert_bitwise(host, device)
    assert test_offload.kinds(host[1].sync_state) == test_offload.HOST


def test_a_resumed_run_goes_on_with_the_next_fragment(tmp_path):
    tx = optimizer(
        optax.sgd(0.1, 0.9),
        outer=optax.sgd(0.7, 0.9, nesterov=True),
        compressor=compressors.low_rank(1),
        fragments=2,
        momentum_every=2,
    )
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
    assert state[1].metrics.variant_syncs.tolist() == [[2, 2, 1, 1]] * 2


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
    assert metrics.observe(state).variant_syncs.tolist() == [[1, 1]] * 2


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
