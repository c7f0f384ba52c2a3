"""Finds communication between replicas that the compiler added to a step.

Within a replica the compiler divides the work and adds collectives. Now and then one of
them joins the devices of all replicas, so that they wait for each other on every step.
Only the compiled program shows it.
"""

import re

import numpy as np
from jax.sharding import Mesh

from curvadion_jax._jax_internals import SCOPE

# %name = f32[8,16]{1,0} all-reduce(...), ..., metadata={op_name="..."}
_COLLECTIVE = re.compile(
    r"= (.*?) ((?:ragged-)?all-(?:reduce|gather|to-all)|reduce-scatter|"
    r"collective-(?:permute|broadcast))(?:-start)?\("
)
_NAME = re.compile(r'op_name="([^"]*)"')
# replica_groups={{0,1},{2,3}}; of a permutation its pairs of a sender and a receiver
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}")
# An arange, transposed: replica_groups=[2,4]<=[2,2,2]T(1,0,2)
_ARANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Axes of a mesh: replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}
_MESH = re.compile(
    r"replica_groups=mesh\[([^]]+)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]+)\}"
)


def between_replicas(text: str, mesh: Mesh, axis_name: str) -> list[str]:
    """Describes each collective between replicas that is not the optimizer's."""
    axis = list(mesh.shape).index(axis_name)
    replica = np.indices(mesh.devices.shape)[axis].ravel()  # of every device
    found = []
    for line in text.splitlines():
        operation, name = _COLLECTIVE.search(line), _NAME.search(line)
        # The compiler makes some without a name, whose size says too little.
        if not operation or not name or SCOPE in name[1]:
            continue
        if any(len(set(replica[group])) > 1 for group in groups(line)):
            result = re.sub(r"\{[^}]*\}", "", operation[1])  # without its layout
            found.append(f"{operation[2]} of {result} in {name[1]}")
    return found


def groups(attributes: str) -> list[list[int]]:
    """The groups of devices that a collective joins; none in an unknown notation."""
    if listed := _LISTED.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{(.*?)\}", listed[1])]
    if found := _MESH.search(attributes):
        axes, sizes, order, joined = found.groups()
        names, inside = (re.findall(r"'(\w+)'", each) for each in (axes, joined))
        shape = [int(size) for size in re.findall(r"=(\d+)", axes)]
        devices = _arange(sizes or ",".join(map(str, shape)), order).reshape(shape)
        last = [names.index(name) for name in inside]
        first = [axis for axis in range(len(names)) if axis not in last]
        devices = devices.transpose(first + last)
        return devices.reshape(-1, int(np.prod([shape[i] for i in last]))).tolist()
    if found := _ARANGE.search(attributes):
        shape, sizes, order = found.groups()
        return _arange(sizes, order).reshape(_numbers(shape)).tolist()
    return []


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in (text or "").split(",") if x]


def _arange(sizes: str, order: str | None) -> np.ndarray:
    shape = _numbers(sizes)
    devices = np.arange(np.prod(shape)).reshape(shape)
    return devices.transpose(_numbers(order) or range(len(shape)))
