"""Replicas of several devices send what is counted, and each element once."""

import itertools

import helpers
import hlo
import jax
import numpy as np
import pytest
from divided_replicas import reconciling
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import _collectives, _mapped, compressors, synchronizers

AXIS = cd.replicas.AXIS
REPLICAS = 2
SHAPES = {
    "down": (512, 256),
    "norm": (1024,),
    "square": (256, 256),
    "stack": (2, 256, 512),  # the transpose of `down`, which tells that it is one
}
# Parts of few elements: blocks are mostly empty, and vectors are sent whole.
SMALL = {"kernel": (68, 16), "bias": (40,), "odd": (4098,), "stack": (2, 16, 68)}
# Axes inside a replica, and how a matrix is sharded; `whole` is data parallelism.
PLACES = {
    "both": ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
    "one_of_two": ({"fsdp": 2, "data": 2}, ("fsdp", None)),
    "whole": ({"data": 4}, (None, None)),
}
RANK = 32


def gathered(tree, group):
    mean = jax.tree.map(lambda x: x.mean(0), group.all_gather(tree))
    return compressors.Averaged(mean, jax.tree.map(lambda x: 0 * x, tree))


# Two replicas send as many bytes in an all-gather as in an all-reduce.
OWN = compressors.exact()._replace(average=gathered)
OPTIMIZERS = {
    "synchronous_dion": lambda: cd.presets.synchronous_dion(
        0.01, rank=RANK, axis_name=AXIS
    ),
    "everything": lambda: reconciling(synchronizers.reconcile(), RANK),
    "quantize": lambda: reconciling(
        synchronizers.reconcile(compressor=compressors.quantize(4)), RANK
    ),
    "own": lambda: reconciling(synchronizers.reconcile(compressor=OWN), RANK),
}
CASES = [*itertools.product(list(OPTIMIZERS)[:3], PLACES, ["large", "small"])]
CASES += [("own", "one_of_two", "small"), ("quantize", "one_of_two", "unknown")]


def placed(place: str, shapes):
    """A mesh, and a random tree divided on it, without the replica axis."""
    inner, divided = PLACES[place]
    mesh, rng = cd.replicas.make_mesh(REPLICAS, inner), np.random.default_rng(0)

    def put(shape):
        spec = PartitionSpec(*[None] * (len(shape) - 2), *divided[-len(shape) :])
        values = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, spec))

    return mesh, {name: put(shape) for name, shape in shapes.items()}


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
@pytest.mark.parametrize(("name", "place", "case"), CASES)
def test_what_devices_hold_alike_crosses_once(name, place, case):
    """Also where the step is in a jit, and does not know how its state is sharded."""
    shapes, tx = SMALL if case == "small" else SHAPES, OPTIMIZERS[name]()
    mesh, params = placed(place, shapes)
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    step = helpers.replica_step(tx, mesh)
    if case == "unknown":
        step = jax.jit(step)
    step = helpers.quick(step, state, state[0])
    devices = 8 // REPLICAS
    sent = sent_by_a_replica(hlo.parse(step.as_text()), devices)
    for _ in range(2):
        state, _ = step(state, state[0])
    # What is counted, without votes.
    metrics = jax.tree.map(lambda x: np.asarray(x)[0], state[1].metrics)
    averaged, gathered = metrics.sent[:, 1].tolist()
    averaged -= 4 * devices * metrics.votes.item()
    payload = compressors.Payload(averaged, gathered)
    assert sent == payload.as_averaged(REPLICAS) / metrics.syncs
    if name == "everything":  # as often as the steps that it is compared with
        assert metrics.synchronous[1] == 2 * (sent - 4 * devices)


def test_means_of_arrays_that_devices_cannot_divide():
    # 3 * 683 elements are no multiple of the four devices.
    mesh, sizes = cd.replicas.make_mesh(REPLICAS, {"data": 4}), (3 * 683, 5)
    rng = np.random.default_rng(0)
    given = {str(n): np.float32(rng.normal(size=(REPLICAS, n))) for n in sizes}
    given = jax.device_put(given, NamedSharding(mesh, PartitionSpec(AXIS)))

    train = lambda x, _: (_collectives.Group(AXIS, _mapped.layout()).mean(x), {})
    mean, _ = helpers.manual(train, mesh, given)(given, np.ones(2))
    for name, x in given.items():
        np.testing.assert_array_equal(mean[name][0], mean[name][1])
        np.testing.assert_allclose(mean[name][0], np.mean(x, 0), rtol=1e-6, atol=1e-7)
