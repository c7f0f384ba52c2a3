"""What the tests of compressors share: trees on replicas, and their compiled means."""

import functools
from typing import Any

import helpers
import hlo
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import _collectives, _partition, compressors

REPLICAS = 4
# float32 sums and products of some hundreds of numbers of order one. Measured: 4e-6.
ATOL = 2e-5
SHAPES = {"bias": (5,), "embed": (40, 12), "stack": (3, 16, 24), "tall": (30, 10)}


def trees(seed=0, replicas=REPLICAS):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(replicas, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def one_of(stacked):
    return jax.tree.map(lambda x: x[0], stacked)


def replicas_of(stacked):
    return len(next(iter(stacked.values())))


def views_of(tree):
    return _partition.matrix_views(tree)


def averaging(compressor, stacked, run="vmap") -> tuple[Any, Any]:
    """Compiled (stacked tree, state) -> `Averaged` of every replica, and a state."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in stacked.items())
    return _averaging(compressor, shapes, run, compressors._PIECE)


@functools.lru_cache(maxsize=32)
def _averaging(compressor, shapes, run, piece) -> tuple[Any, Any]:
    """Once for all tests of a compressor; some of them cut arrays in other pieces."""
    del piece
    stacked = {name: np.zeros(shape, dtype) for name, shape, dtype in shapes}
    one = one_of(stacked)
    views = views_of(one)
    state = compressor.init(one, views)
    body = _body(compressor, views)
    if run == "mesh":
        mapped = on_mesh(body, replicas_of(stacked))
    else:
        mapped = jax.jit(jax.vmap(body, in_axes=(0, None), axis_name=helpers.AXIS))
    return helpers.quick(mapped, stacked, state), state


def average(compressor, stacked, run="vmap"):
    """`Averaged` of every replica, with a leading replica axis."""
    mapped, state = averaging(compressor, stacked, run)
    return jax.device_get(mapped(stacked, state))


def sent(result, stacked, key):
    """What every replica put in."""
    return stacked[key] - result.unsent[key]


def collectives(compressor, stacked) -> list[hlo.Instruction]:
    """What the compiled mean communicates."""
    one = one_of(stacked)
    views = views_of(one)
    mapped = on_mesh(_body(compressor, views), replicas_of(stacked))
    lowered = mapped.lower(stacked, compressor.init(one, views))
    program = hlo.parse(lowered.compile().as_text())
    return program.collectives([program.entry])


def sent_bytes(instructions, replicas=REPLICAS) -> float:
    """Bytes that one replica sends in these instructions."""
    factor = {
        "all-reduce": 2 * (replicas - 1) / replicas,
        "all-to-all": (replicas - 1) / replicas,
        "all-gather": (replicas - 1) / replicas,  # of the result
    }
    return sum(each.bytes * factor[each.opcode] for each in instructions)


def _body(compressor, views):
    def body(tree, state):
        group = _collectives.Replicas(helpers.AXIS)
        return compressor.average(tree, state, group, views)

    return body


def on_mesh(body, replicas):
    def strip(tree, state):
        tree = jax.tree.map(lambda x: x[0], tree)
        state = _collectives.vary(state, helpers.AXIS)
        return jax.tree.map(lambda x: x[None], body(tree, state))

    return jax.jit(
        jax.shard_map(
            strip,
            mesh=cd.replicas.make_mesh(replicas),
            in_specs=(P(helpers.AXIS), P()),
            out_specs=P(helpers.AXIS),
        )
    )
