"""Single all-reduces: timed, and found in the compiled program of a training step."""

import re
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from job import MESSAGES

import curvadion_jax as cd

# Bytes: a flag; one of the model's arrays; all that CurvaDion sends at a sync; all
# gradients.
SIZES = (4, 36_864, 107_496, 1_526_400)
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")
_WHILE = re.compile(r'body=(%[\w.-]+).*?"known_trip_count":\{"n":"(\d+)"')


def measure(mesh: Mesh, steps: int, write: Callable[..., None]) -> None:
    """All-reduce float32 arrays of each of `SIZES`, one after another."""
    divided = NamedSharding(mesh, PartitionSpec(cd.replicas.AXIS))
    reduce = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, cd.replicas.AXIS),
            mesh=mesh,
            in_specs=PartitionSpec(cd.replicas.AXIS),
            out_specs=PartitionSpec(),
        )
    )
    for size in SIZES:
        shape = (mesh.size, size // 4)
        local = np.ones((mesh.size // jax.process_count(), size // 4), np.float32)
        array = jax.make_array_from_process_local_data(divided, local, shape)
        jax.block_until_ready(reduce(array))
        for step in range(steps + 1):
            write(part=MESSAGES, step=step, size=size)
            if step < steps:
                jax.block_until_ready(reduce(array))


def in_program(text: str) -> list[tuple[str, int]]:
    """Kind and bytes of every array that a compiled program gives to a collective.

    gloo sends each by itself, one after the other.

    Args:
        text: Of an XLA program; what stands in a loop counts as often as it runs.

    Examples:
        >>> in_program('''
        ... %sync (x: f32[8]) -> f32[8] {
        ...   %mean = (f32[8]{0}, s32[]) all-reduce(%x, %y), to_apply=%add
        ... ''')
        [('all-reduce', 32), ('all-reduce', 4)]
    """
    times = {name: int(count) for name, count in _WHILE.findall(text)}
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            computation = line.removeprefix("ENTRY ").partition(" ")[0]
        if match := _COLLECTIVE.search(line):
            shapes, kind = match.groups()
            arrays = [(kind, _bytes(*array)) for array in _ARRAY.findall(shapes)]
            found += times.get(computation, 1) * arrays
    return found


def _bytes(kind: str, bits: str, shape: str) -> int:
    del kind
    return int(np.prod([int(n) for n in shape.split(",") if n])) * int(bits) // 8
