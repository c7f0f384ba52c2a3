"""Meshes, and the step that runs on all replicas."""

import dataclasses
import itertools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import replicas, synchronizers, triggers

AXIS = helpers.AXIS
# The same mathematics on one device a replica and on two: sums in another order, on
# numbers of order 1. Measured: 1e-7.
SHARDED_ATOL = 2e-6


def test_mesh():
    mesh = replicas.make_mesh(2, {"fsdp": 4})
    assert mesh.axis_names == ("replica", "fsdp")
    assert mesh.axis_types == (AxisType.Auto,) * 2
    ids = [[device.id for device in row] for row in mesh.devices]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What a mesh looks at in a device of a larger machine."""

    id: int
    slice_index: int
    process_index: int


def fake_devices(slices: int, processes: int, chips: int) -> list[FakeDevice]:
    """Chips of every process of every slice, in an order that mixes all of them."""
    numbers = itertools.product(range(chips), range(processes), range(slices))
    return [
        FakeDevice(number, where, where * processes + process)
        for number, (_, process, where) in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("machine", "number", "inner", "slices"),
    [
        pytest.param((2, 2, 4), 2, 8, [{0}, {1}], id="a-slice-each"),
        pytest.param((2, 2, 4), 4, 4, [{0}, {0}, {1}, {1}], id="two-in-a-slice"),
        pytest.param((2, 1, 8), 2, 4, [{0}, {1}], id="half-of-each-slice"),
        pytest.param((4, 1, 2), 2, 4, [{0, 1}, {2, 3}], id="two-slices-each"),
    ],
)
def test_a_replica_is_made_of_a_slice(monkeypatch, machine, number, inner, slices):
    devices = fake_devices(*machine)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: machine[0] * machine[1])
    mesh = replicas.make_mesh(number, {"fsdp": inner})
    assert [{device.slice_index for device in row} for row in mesh.devices] == slices
    for row in mesh.devices:
        places = [(device.slice_index, device.process_index) for device in row]
        assert places == sorted(places)


def test_replicas_are_divided_over_processes_of_one_slice(monkeypatch):
    devices = fake_devices(1, 4, 8)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    mesh = replicas.make_mesh(8)
    hosts = [device.process_index for device in mesh.devices]
    assert hosts == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="leaves process 2 of 4 without a device"):
        replicas.make_mesh(10)


def test_mesh_of_given_devices_and_name():
    mesh = replicas.make_mesh(2, axis_name="pod", devices=jax.devices()[5:])
    assert mesh.axis_names == ("pod",)
    assert [device.id for device in mesh.devices] == [5, 6]


def test_idle_devices_are_told(caplog):
    replicas.make_mesh(2, devices=jax.devices()[:3])  # named by the caller
    replicas.make_mesh(2, {"data": 4})
    assert not caplog.records
    replicas.make_mesh(3)
    assert "uses 3 of 8 devices and leaves 5 idle" in caplog.text


def test_the_replica_axis_may_have_another_name():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    renamed = replicas.replicate({"w": jnp.ones(2)}, mesh, axis_name="data")
    assert renamed["w"].shape == (2, 2)


def test_a_step_is_traced_once():
    mesh, traces = replicas.make_mesh(1), []

    def train(state, batch):
        traces.append(0)
        key, used = jax.random.split(state["key"])
        noisy = state["train"].apply_gradients(grads=batch)
        mean = 0.9 * state["mean"] + 0.1 * batch["bias"].mean()
        new = {"train": noisy, "key": key, "mean": mean, "count": state["count"] + 1}
        return new, {"draw": jax.random.normal(used), "count": new["count"]}

    start = {
        "train": helpers.train_state(),
        "key": jax.random.key(0),
        "count": 0,
        "mean": 0.0,
    }
    state = replicas.replicate(start, mesh)
    step = replicas.step(
        lambda state, batch: train(state, jax.tree.map(lambda g: g[0], batch)),
        mesh,
    )
    for tree in helpers.make_gradients(4, 1):
        tree["embed"] = tree["embed"].astype(jnp.bfloat16)
        state, _ = step(state, tree)
    assert len(traces) == 1
    assert state["count"].tolist() == [4]
    assert state["train"].step.tolist() == [4]


def test_a_weakly_typed_array_does_not_compile_the_step_again():
    mesh, traces = replicas.make_mesh(1), []

    def train(mean, batch):
        traces.append(0)
        return 0.9 * mean + 0.1 * batch.mean(), ()

    mean, step = replicas.replicate(jnp.asarray(0.0), mesh), replicas.step(train, mesh)
    for _ in range(3):
        mean, _ = step(mean, jnp.ones(2))
    assert len(traces) == 1


def test_metrics_keep_every_replicas_value():
    mesh = replicas.make_mesh(4)

    def train(state, batch):
        metrics = {"sum": batch["x"].sum(), "rows": batch["x"], "number": 1.5}
        return state, metrics

    state = replicas.replicate(jnp.zeros(3), mesh)
    batch = {"x": jnp.arange(16.0).reshape(8, 2)}
    state, metrics = replicas.step(train, mesh)(state, batch)
    assert state.shape == (4, 3)
    assert metrics["sum"].tolist() == [6, 22, 38, 54]
    assert metrics["rows"].shape == (4, 2, 2)
    assert metrics["number"].tolist() == [1.5] * 4
    assert metrics["sum"].sharding.spec == PartitionSpec("replica")


def test_what_all_replicas_share_is_the_same():
    def train(state, batch, number, table):
        return state, number * batch.sum() + table["x"][1]

    mesh = replicas.make_mesh(2)
    step = replicas.step(train, mesh)
    state = replicas.replicate(0.0, mesh)
    _, found = step(state, jnp.arange(4.0), 10, {"x": jnp.array([0.0, 7.0])})
    assert found.tolist() == [10 * 1 + 7, 10 * 5 + 7]


def test_the_step_keeps_the_functions_name():
    def my_step(state, batch):
        """Words."""
        return state, batch

    step = replicas.step(my_step, replicas.make_mesh(1))
    assert (step.__name__, step.__doc__) == ("my_step", "Words.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "synchronizer",
    [
        pytest.param(
            synchronizers.average_gradients(),
            id="average_gradients",
            marks=pytest.mark.slow,
        ),
        pytest.param(synchronizers.reconcile(), id="reconcile"),
    ],
)
def test_one_replica_needs_no_axis(synchronizer):
    gradients = helpers.make_gradients(3, 1)
    runs = [
        helpers.run_mesh(
            cd.adaptive_sync(
                optax.sgd(0.1, 0.9), triggers.every_k(2), synchronizer, name
            ),
            helpers.make_params(),
            gradients,
        )
        for name in (None, AXIS)
    ]
    for (params, state), (other_params, other) in zip(*runs, strict=True):
        # Without an axis nobody is asked, and no payload counted; all else is the same.
        counters, asked = state.metrics, other.metrics.votes
        assert counters.votes == 0 < asked
        assert not counters.sent.any()
        assert other.metrics.sent.any()
        # Of a payload one replica sends nothing.
        assert cd.metrics.read(state)["bytes"] == cd.metrics.read(other)["bytes"] == 0
        expected = other.metrics._replace(votes=counters.votes, sent=counters.sent)
        helpers.assert_bitwise(
            (params, state), (other_params, other._replace(metrics=expected))
        )


@pytest.mark.slow
def test_replicas_of_several_devices_are_the_same():
    gradients = helpers.make_gradients(4, 2)
    tx = helpers.synced_dion(
        0.1,
        0.25,
        triggers.every_k(2),
        synchronizers.average_factors(),
        axis_name=AXIS,
    )
    mesh = replicas.make_mesh(2, {"fsdp": 2})
    state = helpers.start(tx, helpers.make_params(), mesh)

    def shard(x):
        # Rows of the matrices over the devices of a replica, momenta included.
        split = x.ndim == 3 and x.shape[1:] in (helpers.SHAPES["tall"], (4, 6))
        spec = PartitionSpec("replica", "fsdp") if split else PartitionSpec("replica")
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    state, step = jax.tree.map(shard, state), helpers.replica_step(tx, mesh)
    expected = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    for tree, (params, _) in zip(gradients, expected, strict=True):
        state, _ = step(state, tree)
        for name, value in params.items():
            np.testing.assert_allclose(state[0][name], value, atol=SHARDED_ATOL)
    assert re.search("fsdp", str(state[0]["tall"].sharding.spec))
