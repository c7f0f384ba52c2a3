"""A site of several processes: the first of them has the thread, and tells the others.

It does so over the site's own devices, in the thread that calls `sync`, at calls that
all processes make in the same order. So no process decides alone what lands at a step,
what is submitted, or what is raised.
"""

import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import (
    broadcast_one_to_all,
    host_local_array_to_global_array,
    process_allgather,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curvadion_jax.sites._store import RunError
from curvadion_jax.sites._worker import Update, Worker

T = TypeVar("T")

# Bytes broadcast at once; each device has room for them.
_PIECE = 2**24
_ERRORS = (ImportError, OSError, RuntimeError, TypeError, ValueError)


def from_first(function: Callable[[], T]) -> T:
    """What a function returns or raises in the first process, in all of them."""
    if jax.process_count() == 1:
        return function()
    found: Any = None
    arrays, data = [], b""
    if jax.process_index() == 0:
        try:
            found = function()
        except Exception as error:
            known = isinstance(error, _ERRORS)
            found = error if known else RunError(f"{type(error).__name__}: {error}")
        small = pickle.dumps(found, 5, buffer_callback=arrays.append)
        data = pickle.dumps((small, [array.raw().nbytes for array in arrays]))
    size = int(broadcast_one_to_all(np.int32(len(data))))
    small, sizes = pickle.loads(_broadcast(data, size))
    given = [array.raw() for array in arrays] or [b""] * len(sizes)
    told = [_broadcast(*pair) for pair in zip(given, sizes, strict=True)]
    found = pickle.loads(small, buffers=told) if found is None else found
    if isinstance(found, Exception):
        raise found
    return found


def check_alike(what: dict[str, Any]) -> None:
    """Rejects, in all processes, what is not the same in all."""
    number = np.int32(zlib.crc32(json.dumps(what).encode()) >> 1)
    if len(set(process_allgather(number).tolist())) > 1:
        raise ValueError(
            f"Process {jax.process_index()} of {jax.process_count()} gives {what}, "
            "and another gives something else. Give join the same in all processes."
        )


def agreed(decision: bool) -> bool:
    """The first process's decision, in all."""
    if jax.process_count() == 1:
        return decision
    return bool(broadcast_one_to_all(np.int32(decision)))


def gather(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Arrays in the host's memory, with memory of their own, one after the other."""
    if jax.process_count() == 1:
        return [np.array(x) for x in arrays]
    return [process_allgather(x, tiled=True) for x in arrays]


class Shared:
    """The updates of the first process's worker, in all.

    The first process says at every step whether there is one. The others read that at
    the next step, when it has long arrived, so no step waits for it.
    """

    def __init__(self) -> None:
        self._flag: jax.Array | None = None
        devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
        self._mesh = Mesh(devices, ("process", "device"))
        whole = NamedSharding(self._mesh, PartitionSpec())
        self._any = jax.jit(jnp.max, out_shardings=whole)

    def take(self, worker: Worker | None) -> Update | None:
        update, told = None, self._flag
        if told is not None and np.asarray(told.addressable_data(0)):
            update = from_first(lambda: worker and worker.take())
        own = np.array([worker is not None and worker.has_update], np.int32)
        spec = PartitionSpec("process")
        self._flag = self._any(host_local_array_to_global_array(own, self._mesh, spec))
        return update


def _broadcast(data: Any, size: int) -> bytes:
    """So many bytes of the first process; in pieces of few lengths: each compiles."""
    found = []
    for first in range(0, size, _PIECE):
        count = min(size - first, _PIECE)
        piece = np.zeros(max(1024, 1 << (count - 1).bit_length()), np.uint8)
        if jax.process_index() == 0:
            piece[:count] = np.frombuffer(data, np.uint8, count, first)
        found.append(np.asarray(broadcast_one_to_all(piece))[:count].tobytes())
    return b"".join(found)
