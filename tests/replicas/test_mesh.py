"""Meshes of replicas: which devices, in which order, and what is no such mesh."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from curvadion_jax import replicas


def test_mesh():
    mesh = replicas.make_mesh(2, {"fsdp": 4})
    assert mesh.axis_names == ("replica", "fsdp")
    assert mesh.axis_types == (AxisType.Auto,) * 2
    ids = [[device.id for device in row] for row in mesh.devices]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mesh = replicas.make_mesh(2, devices=jax.devices()[5:])
    assert mesh.axis_names == ("replica",)
    assert [device.id for device in mesh.devices] == [5, 6]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What a mesh looks at in a device of a larger machine."""

    id: int
    slice_index: int
    process_index: int


def machine(monkeypatch, slices: int, processes: int, chips: int) -> None:
    """Chips of every process of every slice, in an order that mixes all of them."""
    numbers = itertools.product(range(chips), range(processes), range(slices))
    devices = [
        FakeDevice(number, where, where * processes + process)
        for number, (_, process, where) in enumerate(numbers)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: slices * processes)


@pytest.mark.parametrize(
    ("shape", "number", "inner", "slices"),
    [
        pytest.param((2, 2, 4), 2, 8, [{0}, {1}], id="a-slice-each"),
        pytest.param((2, 2, 4), 4, 4, [{0}, {0}, {1}, {1}], id="two-in-a-slice"),
        pytest.param((4, 1, 2), 2, 4, [{0, 1}, {2, 3}], id="two-slices-each"),
    ],
)
def test_a_replica_is_made_of_a_slice(monkeypatch, shape, number, inner, slices):
    machine(monkeypatch, *shape)
    mesh = replicas.make_mesh(number, {"fsdp": inner})
    assert [{device.slice_index for device in row} for row in mesh.devices] == slices
    for row in mesh.devices:
        places = [(device.slice_index, device.process_index) for device in row]
        assert places == sorted(places)


def test_every_process_has_a_device(monkeypatch):
    machine(monkeypatch, 1, 4, 8)
    with pytest.raises(ValueError, match="leaves process 2 without a device"):
        replicas.make_mesh(10)


def test_idle_devices_are_reported(caplog):
    replicas.make_mesh(2, devices=jax.devices()[:3])  # named by the caller
    replicas.make_mesh(2, {"data": 4})
    assert not caplog.records
    replicas.make_mesh(3)
    assert "uses 3 of 8 devices" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9,), "needs 9 devices, and there are 8"),
        ((0,), "needs 0 devices"),
        ((2, {"replica": 2}), "are both named 'replica'"),
        ((None, {"fsdp": 16}), "needs 0 devices"),
        ((None, {"fsdp": 0}), "needs 0 devices"),
    ],
)
def test_meshes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        replicas.make_mesh(*arguments)


@pytest.mark.parametrize("inner", [4, "fsdp", ["fsdp", 2]], ids=repr)
def test_a_number_in_place_of_inner_axes_is_refused(inner):
    with pytest.raises(
        TypeError, match=r'a mapping from axes to sizes.*give \{"fsdp": 4'
    ):
        replicas.make_mesh(2, inner)


def test_the_type_of_inner_axes_is_chosen():
    mesh = replicas.make_mesh(2, {"fsdp": 4}, inner_type=AxisType.Explicit)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", None])
def test_a_simulation_needs_a_number_of_replicas(number):
    with pytest.raises(ValueError, match="must be an int of at least 1"):
        replicas.simulated(number)


def test_a_mesh_without_the_axis_or_with_an_explicit_one_is_refused():
    devices = np.array(jax.devices()[:2])
    explicit = Mesh(devices, ("replica",), axis_types=(AxisType.Explicit,))
    for wrong in (Mesh(devices, ("data",)), explicit):
        for function in (replicas.replicate, replicas.place, replicas.split):
            with pytest.raises(ValueError, match="an axis 'replica' of type Auto"):
                function({"w": jnp.ones(2)}, wrong)


def test_the_replica_axis_of_a_mesh_of_ones_own_may_stand_anywhere():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("fsdp", "replica"))
    rows = replicas.replicate({"w": jnp.arange(4.0)}, mesh)["w"]
    assert rows.shape == (2, 4)
    assert rows.sharding.spec == PartitionSpec("replica")
    found = replicas.audit(lambda x: x.sum(0), mesh, rows)
    assert [x.kind for x in found.every_step] == ["all-reduce"]
