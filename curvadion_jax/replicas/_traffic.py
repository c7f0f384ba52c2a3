"""What a compiled step sends between replicas, beside the optimizer.

Within a replica the compiler divides the work and adds collectives of its own. Now and
then one of them goes over all devices where devices of one replica would have done, and
then replicas wait for each other on every step. Only the compiled program shows it.
"""

import math
import re

import numpy as np
from jax.sharding import Mesh

from curvadion_jax import _guards

_COLLECTIVES = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    "collective-broadcast|ragged-all-to-all"
)
# %name = f32[8,16]{1,0} all-reduce(...), ..., metadata={op_name="..."}
_LINE = re.compile(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(")
_NAME = re.compile(r'op_name="([^"]*)"')
# replica_groups={{0,1},{2,3}}; of a permutation its pairs of a sender and a receiver
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}")
# replica_groups=[2,4]<=[2,2,2]T(1,0,2): an arange, transposed
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}
_MESH = re.compile(
    r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)+)\}"
)


def between_replicas(text: str, mesh: Mesh, axis_name: str) -> list[str]:
    """Collectives between replicas that are not the optimizer's, one line each.

    Args:
      text: of the compiled program.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.
    """
    shape = tuple(mesh.shape.values())
    axis = list(mesh.shape).index(axis_name)
    replica = np.indices(shape)[axis].ravel()  # of every device
    found = []
    for line in text.splitlines():
        operation, name = _LINE.search(line), _NAME.search(line)
        # What has no name is of the compiler's making; its size says too little.
        if not operation or not name or _guards.SCOPE in name[1]:
            continue
        if any(len(set(replica[group])) > 1 for group in groups(line)):
            result = re.sub(r"\{[^}]*\}", "", operation[1])  # without its layout
            found.append(f"{operation[2]} of {result} in {name[1]}")
    return found


def groups(attributes: str) -> list[list[int]]:
    """Devices that a collective joins, as it is written; none where that is new."""
    if listed := _LISTED.search(attributes):
        parts = re.findall(r"\{([\d,]+)\}", listed[1])
        return [[int(x) for x in part.split(",")] for part in parts]
    if mesh := _MESH.search(attributes):
        return _groups_of_mesh(*mesh.groups())
    if not (iota := _IOTA.search(attributes)):
        return []
    shape, sizes, order = map(_numbers, iota.groups())
    return _arange(sizes, order).reshape(shape).tolist()


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in (text or "").split(",") if x]


def _arange(sizes: list[int], order: list[int]) -> np.ndarray:
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(order or range(len(sizes)))


def _groups_of_mesh(
    mesh: str, sizes: str | None, order: str | None, joined: str
) -> list[list[int]]:
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    inside = re.findall(r"'(\w+)'", joined)
    shape = list(axes.values())
    devices = _arange(_numbers(sizes) or shape, _numbers(order)).reshape(shape)
    by_axis = [name for name in axes if name not in inside] + inside
    devices = devices.transpose([list(axes).index(name) for name in by_axis])
    return devices.reshape(-1, math.prod(axes[name] for name in inside)).tolist()
