"""Checkpoints of replicated states: exact round trips, and what is refused."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from stored_states import REPLICAS, assert_same, blank, differ, sharding, train_state

import curvadion_jax as cd
from curvadion_jax import checkpoint


@pytest.fixture
def simple() -> dict[str, Any]:
    return differ({"b": jnp.zeros(3), "w": {"kernel": jnp.ones((4, 2), jnp.bfloat16)}})


def test_round_trip_is_bitwise(tmp_path):
    state = differ(train_state())
    assert state["train"].params["kernel"].dtype == jnp.bfloat16
    checkpoint.save(tmp_path, 12, state)
    for target in (state, blank(state)):
        restored = checkpoint.restore(tmp_path, target)
        assert_same(restored, state)
        assert restored["train"].apply_fn is state["train"].apply_fn
        assert restored["train"].tx is state["train"].tx
    shards = restored["train"].params["kernel"].addressable_shards
    assert [s.data.shape for s in shards] == [(1, 16, 8)] * REPLICAS


@pytest.mark.slow
def test_odd_values_and_dtypes_keep_their_bits(tmp_path):
    quiet_nan = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)
    tree = {
        "float32": jnp.array([-0.0, np.inf, 1e-45, *quiet_nan]),
        "float16": jnp.array([-0.0, 6e-8], jnp.float16),
        "float8": jnp.array([0.5, -2], jnp.float8_e4m3fn),
        "uint8": jnp.array([0, 255], jnp.uint8),
        "int32": jnp.array([-(2**31), 2**31 - 1]),
        "complex64": jnp.array([1 - 2j], jnp.complex64),
        "rbg": jax.random.key(5, impl="rbg"),
        # Names that orbax would take for one.
        **{"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "c/d": jnp.ones(3)},
    }
    state = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree),
        out_shardings=sharding(),
    )()
    checkpoint.save(tmp_path, 0, state)
    assert_same(checkpoint.restore(tmp_path, blank(state)), state)


@pytest.mark.slow
def test_nnx_state_and_modules(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, split = nnx.split((model, optimizer))
    state = differ(split)
    checkpoint.save(tmp_path / "state", 1, state)
    restored = checkpoint.restore(tmp_path / "state", blank(state))
    assert_same(restored, state)
    merged, _ = nnx.merge(graph, restored)
    assert merged.layers[1].kernel.shape == (REPLICAS, 4, 4)
    # Modules are pytrees too, with string and integer keys in one node.
    modules = differ((model, optimizer))
    checkpoint.save(tmp_path / "modules", 1, modules)
    assert_same(checkpoint.restore(tmp_path / "modules", modules), modules)


@pytest.mark.slow
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    def replica_step(state, batch):
        def loss(params):
            prediction = state.apply_fn({"params": params}, batch)
            return jnp.mean(prediction.astype(jnp.float32) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    step = jax.jit(jax.vmap(replica_step), donate_argnums=0)
    batch = differ(jnp.ones((2, 16)))
    state = step(differ(train_state()["train"]), batch)
    checkpoint.save(tmp_path, 1, state)
    target = blank(state)
    uninterrupted = step(step(state, batch), batch)
    restored = checkpoint.restore(tmp_path, target)
    resumed = step(restored, batch)
    chex.assert_trees_all_equal(step(resumed, batch), uninterrupted)
    # The donated arrays still describe where to restore to.
    checkpoint.restore(tmp_path, restored)


def test_target_decides_the_devices(tmp_path, simple):
    checkpoint.save(tmp_path, 1, simple)
    for place in (sharding(4), jax.sharding.SingleDeviceSharding(jax.devices()[2])):
        target = jax.tree.map(
            lambda x, s=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            simple,
        )
        restored = checkpoint.restore(tmp_path, target)
        assert restored["w"]["kernel"].sharding == place
        chex.assert_trees_all_equal(restored, jax.device_put(simple, place))


def test_extra_and_relative_directory(tmp_path, simple, monkeypatch):
    monkeypatch.chdir(tmp_path)
    extra = {"position": 2**40, "config": {"rank": 0.25, "shape": (2, 3)}}
    checkpoint.save("runs/first", 10, simple, extra=extra)
    checkpoint.save(Path("runs/first"), 20, simple)
    assert (tmp_path / "runs/first/20").is_dir()
    assert checkpoint.read_extra("runs/first") == {}
    want = {"position": 2**40, "config": {"rank": 0.25, "shape": [2, 3]}}
    assert checkpoint.read_extra("runs/first", 10) == want
    assert_same(checkpoint.restore("runs/first", simple, 10), simple)


def test_extra_takes_single_numbers_of_numpy_and_jax_and_no_arrays(tmp_path, simple):
    extra = {"loss": np.float32(0.5), "tokens": np.int64(2**40), "step": jnp.array(3)}
    checkpoint.save(tmp_path, 1, simple, extra=extra)
    want = {"loss": 0.5, "tokens": 2**40, "step": 3}
    assert checkpoint.read_extra(tmp_path) == want
    with pytest.raises(TypeError, match="arrays belong into the state"):
        checkpoint.save(tmp_path, 2, simple, extra={"losses": np.ones(2)})
    assert checkpoint.latest_step(tmp_path) == 1


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 10]), (1, [10])], ids=str)
def test_keep(tmp_path, simple, keep, left):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, step, simple, keep=keep)
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == left
    assert checkpoint.latest_step(tmp_path) == 10


def test_no_step_is_replaced(tmp_path, simple):
    other = jax.tree.map(jnp.zeros_like, simple)
    for step in (3, 5):
        checkpoint.save(tmp_path, step, simple, extra={"first": True})
    checkpoint.save(tmp_path, 5, simple, extra={"first": False})  # by a resumed loop
    for step, state in ((5, other), (4, simple), (-1, simple)):
        with pytest.raises(ValueError, match=f"Step {step} does not lie above 5"):
            checkpoint.save(tmp_path, step, state, keep=1)
    assert checkpoint.read_extra(tmp_path) == {"first": True}
    assert_same(checkpoint.restore(tmp_path, simple), simple)


def test_a_part_alone_is_restored_by_its_paths(tmp_path):
    """The parameters of a TrainState, without its optimizer."""
    state = differ(train_state())
    checkpoint.save(tmp_path, 1, state)
    kernel = state["train"].params["kernel"]
    target = {"train": {"params": {"kernel": blank(kernel)}}}
    found = checkpoint.restore(tmp_path, target, partial=True)
    assert_same(found["train"]["params"]["kernel"], kernel)
    with pytest.raises(ValueError, match=r"at step 1 in .* and missing in the"):
        checkpoint.restore(tmp_path, target)
    with pytest.raises(ValueError, match="'other' is missing at step 1") as refused:
        checkpoint.restore(tmp_path, {"other": kernel}, partial=True)
    assert "partial" not in str(refused.value)  # which was passed
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    one = jax.ShapeDtypeStruct((1, *kernel.shape[1:]), kernel.dtype, sharding=place)
    (mean,) = checkpoint.restore(
        tmp_path, {"train": {"params": {"kernel": one}}}, resize=True, partial=True
    )["train"]["params"]["kernel"]
    expected = np.asarray(kernel, np.float64).mean(0)
    np.testing.assert_allclose(np.float64(mean), expected, rtol=2**-8)


def test_another_target_is_refused(tmp_path, simple):
    checkpoint.save(tmp_path, 1, simple)
    for change, said in (
        (lambda x: x[:4], r"'b' is float32\[8, 3\] .* float32\[4, 3\].* resize=True"),
        (lambda x: x[..., :1], r"'b' is float32\[8, 3\] .* float32\[8, 1\]"),
        (lambda x: x.astype(jnp.float16), r"'b' is float32.*float16\[8, 3\]"),
        (
            lambda x: 3,
            r"'b' is 3, which has no sharding.*replicas\.place\(state, mesh\)",
        ),
        (lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), "give abstract arrays a"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoint.restore(tmp_path, jax.tree.map(change, simple))


SIMULATED = cd.replicas.simulated(2)
RATES = optax.linear_schedule(0.1, 0.0, 9)
exact = lambda **options: cd.local_muon(
    0.1, synchronizer=cd.synchronizers.reconcile(**options), mesh=SIMULATED
)
# Other options than those of local_muon(0.1) -> whose state the message names.
OPTIONS = {
    "schedule": (
        cd.local_muon(RATES, mesh=SIMULATED),
        "each schedule counts its steps",
    ),
    "decay": (
        cd.local_muon(0.1, weight_decay=RATES, mesh=SIMULATED),
        "each schedule counts its steps",
    ),
    "dtype": (
        cd.local_muon(0.1, mu_dtype="bfloat16", mesh=SIMULATED),
        "the inner optimizer",
    ),
    "outer optimizer": (exact(outer=optax.adam(0.7)), "its outer optimizer"),
    "no outer optimizer": (exact(), "its outer optimizer"),
    "no compressor": (
        exact(outer=optax.sgd(1.0, 0.4, True, accumulator_dtype=jnp.bfloat16)),
        "the compressor, which bits= chooses",
    ),
    "trigger": (cd.curvadion(0.1, mesh=SIMULATED), "the trigger"),
    "before": (
        cd.local_muon(0.1, before=optax.ema(0.9), mesh=SIMULATED),
        "before=",
    ),
    "synchronizer": (
        cd.presets.synchronous_muon(0.1, mesh=SIMULATED),
        "the synchronizer, of which reconcile has an anchor",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_state_of_other_options_is_refused_with_the_option(tmp_path, name):
    tx, option = OPTIONS[name]
    rows = cd.replicas.replicate({"kernel": jnp.ones((4, 6))}, SIMULATED)
    saved = cd.local_muon(0.1, mesh=SIMULATED).init(rows)
    checkpoint.save(tmp_path, 1, {"opt_state": saved})
    with pytest.raises(ValueError, match=f"'opt_state/.*, of .*{option}") as refused:
        checkpoint.restore(tmp_path, {"opt_state": tx.init(rows)})
    assert "resize" not in str(refused.value)


def test_arrays_without_elements_are_saved(tmp_path):
    """Such as of a LoRA of rank 0, and of the optimizer's state for it."""
    params = {"lora": jnp.zeros((4, 0)), "kernel": jnp.ones((4, 6))}
    rows = cd.replicas.replicate(params, SIMULATED)
    state = {"params": rows, "opt": cd.local_muon(0.1, mesh=SIMULATED).init(rows)}
    checkpoint.save(tmp_path / "run", 1, state)
    assert_same(checkpoint.restore(tmp_path / "run", state), state)
    one = cd.replicas.simulated(1)
    fewer = cd.replicas.resize(state, one)
    restored = checkpoint.restore(tmp_path / "run", fewer, resize=True)
    assert_same(restored, fewer)
    longer = {"lora": jnp.zeros((2, 4, 1)), "kernel": rows["kernel"]}
    with pytest.raises(ValueError, match=r"'params/lora' is float32\[2, 4, 0\] at"):
        checkpoint.restore(tmp_path / "run", state | {"params": longer})


@pytest.mark.parametrize("number", [3, 2.5, np.float32(1), np.arange(3)], ids=repr)
def test_numbers_and_arrays_of_the_host_are_refused(tmp_path, simple, number):
    """As the step of a Flax TrainState that was not placed."""
    with pytest.raises(
        ValueError, match=r"'step' is .* no sharding.* replicas\.place\(state, mesh\)"
    ):
        checkpoint.save(tmp_path, 1, simple | {"step": number})
    assert not [*tmp_path.iterdir()]


def test_no_checkpoint(tmp_path, simple):
    folder = tmp_path / "runs"
    assert checkpoint.latest_step(folder) is None
    for read in (
        lambda: checkpoint.restore(folder, simple),
        lambda: checkpoint.read_extra(folder, 3),
    ):
        with pytest.raises(FileNotFoundError, match=f"in {folder}; its steps are"):
            read()


def test_inside_an_event_loop(tmp_path, simple):
    """As in a notebook cell, which runs in a loop already."""

    async def cell():
        checkpoint.save(tmp_path, 1, simple)
        return checkpoint.restore(tmp_path, simple)

    assert_same(asyncio.run(cell()), simple)


def test_without_orbax(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (checkpoint.latest_step, checkpoint.read_extra):
        with pytest.raises(ImportError, match="pip install orbax-checkp"):
            call(tmp_path)
