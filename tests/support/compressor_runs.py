"""What the tests of compressors share: trees on replicas, and their compiled means."""

import functools
from typing import Any

import helpers
import hlo
import jax
import numpy as np

from curvadion_jax import _buckets
from curvadion_jax.mesh import _rows
from curvadion_jax.synchronizers import Group

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


def averaging(compressor, stacked, kind="simulated") -> Any:
    """Compiled rows -> `Averaged` of every replica."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in stacked.items())
    return _averaging(compressor, shapes, kind, _buckets.PIECE)


@functools.lru_cache(maxsize=32)
def _averaging(compressor, shapes, kind, piece) -> Any:
    """Once for all tests of a compressor; some of them cut arrays in other pieces."""
    del piece
    stacked = {name: np.zeros(shape, dtype) for name, shape, dtype in shapes}
    return helpers.quick(_mapped(compressor, stacked, kind), stacked)


def _mapped(compressor, stacked, kind):
    def of_one(tree, _):
        return compressor.average(tree, Group(helpers.AXIS)), ()

    mesh = helpers.mesh_of(kind, helpers.replicas_of([stacked]))
    return jax.jit(lambda tree: _rows.over(of_one, mesh)(tree, ())[0])


def average(compressor, stacked, kind="simulated"):
    """`Averaged` of every replica, with a leading replica axis."""
    return jax.device_get(averaging(compressor, stacked, kind)(stacked))


def collectives(compressor, stacked) -> list[hlo.Instruction]:
    """What the compiled mean communicates."""
    lowered = _mapped(compressor, stacked, "mesh").lower(stacked)
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
