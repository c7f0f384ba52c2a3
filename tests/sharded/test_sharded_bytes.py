"""Replicas of several devices send what is counted, and each element once."""

import helpers
import hlo
import jax
import numpy as np
import pytest
from divided_replicas import reconciling
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import _collectives, _layout, compressors, synchronizers

AXIS = cd.replicas.AXIS
REPLICAS = 2
SHAPES = {
    "down": (512, 256),
    "norm": (1024,),
    "square": (256, 256),
    "stack": (2, 256, 384),
}
# Axes inside a replica, and how a matrix is sharded; `whole` is data parallelism.
PLACES = {
    "both": ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
    "one_of_two": ({"fsdp": 2, "data": 2}, ("fsdp", None)),
    "whole": ({"data": 4}, (None, None)),
}
RANK = 32
# Of all bytes: rows of zeros that fill the last blocks, and scales.
FILLED = 0.02


OPTIMIZERS = {
    "synchronous_dion": lambda: cd.presets.synchronous_dion(
        0.01, rank=RANK, axis_name=AXIS
    ),
    "everything": lambda: reconciling(synchronizers.reconcile(), RANK),
    "quantize": lambda: reconciling(
        synchronizers.reconcile(compressor=compressors.quantize(4)), RANK
    ),
}
CASES = [("synchronous_dion", place) for place in PLACES]
CASES += [(name, "whole") for name in OPTIMIZERS if name != "synchronous_dion"]


def placed(place: str):
    """A mesh, and a random tree divided on it, without the replica axis."""
    inner, divided = PLACES[place]
    mesh, rng = cd.replicas.make_mesh(REPLICAS, inner), np.random.default_rng(0)

    def put(shape):
        spec = PartitionSpec(*[None] * (len(shape) - 2), *divided[-len(shape) :])
        values = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, spec))

    return mesh, {name: put(shape) for name, shape in SHAPES.items()}


def sent_by_a_replica(program: hlo.Program, devices: int) -> float:
    """As bytes of an all-reduce, whose two halves are what else codes cross in."""
    total = 0.0
    for each in program.collectives([*program.computations]):
        crosses = any(len({x // devices for x in group}) > 1 for group in each.groups)
        if crosses and each.shape != "s32[]":  # the flag
            assert not each.joins(devices)
            total += each.bytes / (1 if each.opcode == "all-reduce" else 2)
    return total * devices


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), CASES)
def test_what_devices_hold_alike_crosses_once(name, place):
    (mesh, params), tx = placed(place), OPTIMIZERS[name]()
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    step = helpers.quick(helpers.replica_step(tx, mesh), state, state[0])
    sent = sent_by_a_replica(hlo.parse(step.as_text()), 8 // REPLICAS)
    for _ in range(2):
        state, _ = step(state, state[0])
    # What is counted, without decisions and weights.
    metrics = jax.tree.map(lambda x: np.asarray(x)[0], state[1].metrics)
    averaged, gathered = metrics.sent[:, 1].tolist()
    payload = compressors.Payload(averaged - 4 * metrics.votes.item(), gathered)
    counted = payload.as_averaged(REPLICAS) / metrics.syncs - 4
    np.testing.assert_allclose(sent, counted, rtol=FILLED)


def test_means_in_pieces_are_means():
    # 3 * 683 elements are no multiple of the four devices.
    mesh, sizes = cd.replicas.make_mesh(REPLICAS, {"data": 4}), (3 * 683, 5)
    given = {
        str(size): np.random.default_rng(size).normal(size=(REPLICAS, size))
        for size in sizes
    }
    given = jax.device_put(
        jax.tree.map(np.float32, given), NamedSharding(mesh, PartitionSpec(AXIS))
    )

    def train(state, batch):
        del batch
        return _collectives.Group(AXIS, _layout.current()).mean(state), {}

    run = helpers.manual(train, mesh, given)
    compiled = run.lower(given, np.ones(2)).compile()
    program = hlo.parse(compiled.as_text())
    shapes = {
        shape
        for each in program.collectives([program.entry])
        for _, shape in each.arrays
        if not each.joins(4)
    }
    assert shapes == {(513,), (1, 5)} or shapes == {(513,), (5,)}
    mean, _ = compiled(given, np.ones(2))
    for name, x in given.items():
        np.testing.assert_array_equal(mean[name][0], mean[name][1])
        np.testing.assert_allclose(mean[name][0], np.mean(x, 0), rtol=1e-6, atol=1e-7)
