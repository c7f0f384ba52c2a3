"""Replicas of several devices send what is counted, and each element once."""

import functools
import itertools
import math
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from divided_replicas import put, reconciling
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers

AXIS = cd.replicas.AXIS
REPLICAS = 2
SHAPES = {
    "down": (512, 256),
    "norm": (1024,),
    "out": (256, 256),
    "stack": (2, 256, 512),
}
# Parts of few elements: blocks are mostly empty, and vectors are sent whole. Of 4098
# elements four devices get no equal parts.
SMALL = {"kernel": (68, 16), "bias": (40,), "odd": (4098,), "stack": (2, 16, 68)}
# Axes inside a replica, and how a matrix is sharded; `whole` is data parallelism.
PLACES = {
    "both": ({"fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
    "one_of_two": ({"fsdp": 2, "data": 2}, ("fsdp", None)),
    "whole": ({"data": 4}, (None, None)),
    "pairs": ({"fsdp": 2}, ("fsdp", None)),
}
RANK = 32


def gathered(tree, group):
    mean = jax.tree.map(lambda x: x.mean(0), group.all_gather(tree))
    return compressors.Averaged(mean, jax.tree.map(lambda x: 0 * x, tree))


# Two replicas send as many bytes in an all-gather as in an all-reduce.
OWN = compressors.exact()._replace(average=gathered)
QUANTIZED = compressors.quantize(4)
OPTIMIZERS = {
    "synchronous_dion": functools.partial(
        cd.presets.synchronous_dion, 0.01, rank=RANK, dimension_numbers=helpers.matrices
    ),
    "everything": reconciling(synchronizers.reconcile(), RANK),
    "quantize": reconciling(synchronizers.reconcile(compressor=QUANTIZED), RANK),
    "own": reconciling(synchronizers.reconcile(compressor=OWN), RANK),
}
CASES = [*itertools.product(list(OPTIMIZERS)[:3], list(PLACES)[:3], ["large", "small"])]
CASES += [("own", "one_of_two", "small")]


def prepare(place: str, shapes, optimizer, replicas=REPLICAS):
    """A step, and what it is given, its parameters divided and random."""
    inner, divided = PLACES[place]
    devices = jax.devices()[: replicas * math.prod(inner.values())]
    mesh = cd.replicas.make_mesh(replicas, inner, devices=devices)
    rng = np.random.default_rng(0)
    specs = {
        name: P(*[None] * (len(shape) - 2), *divided[-len(shape) :])
        for name, shape in shapes.items()
    }
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)
    params = {name: put(draw(shapes[name]), mesh, specs[name]) for name in shapes}
    tx = optimizer(mesh=mesh, specs=specs)
    state = helpers.start(tx, params, mesh)
    step = jax.jit(helpers.train_step(tx))
    return step, state, mesh


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "case"), CASES)
def test_what_devices_hold_alike_crosses_once(name, place, case):
    shapes = SMALL if case == "small" else SHAPES
    step, state, mesh = prepare(place, shapes, OPTIMIZERS[name])
    sent = cd.replicas.audit(step, mesh, state, state[0])
    messages = [*sent.every_step, *sent.sync]
    devices = 8 // REPLICAS
    by_hand = devices * sum(helpers.bytes_sent(x, REPLICAS) for x in messages)
    step = helpers.quick(step, state, state[0])
    for _ in range(2):
        state, _ = step(state, state[0])
    # An all-reduce of B bytes between two replicas sends B.
    report = cd.metrics.read(state[1])
    assert report["bytes"] == by_hand * report["syncs"]
    assert report["votes"] == 0
    if name == "everything":  # as often as the steps that it is compared with
        assert report["synchronous_bytes"] == 2 * (by_hand - 4 * devices)
    whole = {f"f32[{','.join(map(str, shape))}]" for shape in shapes.values()}
    if case == "large":
        arrays = {
            x for each in messages for x in re.findall(r"\w+\[[\d,]*\]", each.arrays)
        }
        assert not arrays & whole


@pytest.mark.parametrize("replicas", [3, 4])
def test_every_device_fills_up_the_blocks_of_each_message(replicas):
    """Of what is sharded, of what its devices share, and of what they send whole."""
    sync = synchronizers.average_gradients(compressors.quantize(4, block=64))
    make = functools.partial(
        cd.adaptive_sync, optax.sgd(0.1), cd.triggers.always(), sync
    )
    step, state, mesh = prepare("pairs", SMALL, make, replicas)
    sent = cd.replicas.audit(step, mesh, state, state[0])
    messages = [*sent.every_step, *sent.sync]
    by_hand = 2 * sum(helpers.bytes_sent(x, replicas) for x in messages)
    report = cd.metrics.read(
        state[1].counters._replace(steps=jnp.int32(1), syncs=jnp.int32(1))
    )
    assert report["bytes"] == round(by_hand)
