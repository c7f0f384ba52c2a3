"""A site of several processes: the first of them has the thread, and tells the others.

It does so over the site's own devices, in the thread that calls `sync`, at calls that
all processes make in the same order. So no process decides alone what lands at a step,
what is submitted, or what is raised.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curvadion_jax.sites._store import RunError, as_bytes
from curvadion_jax.sites._worker import Update, Worker

T = TypeVar("T")

# Bytes broadcast at once; each device has room for them.
_PIECE = 2**24
_ERRORS = (RunError, ImportError, OSError, TypeError, ValueError)


def from_first(function: Callable[[], T]) -> T | None:
    """What a function returns in the first process, None in the others.

    What it raises, all raise: the others an error of the same kind, if they know it.
    """
    if jax.process_count() == 1:
        return function()
    found, error = None, None
    if jax.process_index() == 0:
        try:
            found = function()
        except Exception as raised:
            error = raised
    kind = next((i for i, each in enumerate(_ERRORS) if isinstance(error, each)), 0)
    told = json.loads(_broadcast_text(json.dumps(error and [kind, str(error)])))
    if error is not None:
        raise error
    if told is not None:
        raise _ERRORS[told[0]](f"the first process of this site: {told[1]}")
    return found


def check_alike(what: dict[str, Any]) -> None:
    """Rejects, in all processes, what is not the same in all."""
    number = np.int32(zlib.crc32(json.dumps(what).encode()) >> 1)
    if len(set(multihost_utils.process_allgather(number).tolist())) > 1:
        raise ValueError(
            f"Process {jax.process_index()} of {jax.process_count()} gives {what}, "
            "and another gives something else. Give join the same in all processes."
        )


def gather(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Arrays in the host's memory, with memory of their own, one after the other."""
    if jax.process_count() == 1:
        return [np.array(x) for x in arrays]
    return [multihost_utils.process_allgather(x, tiled=True) for x in arrays]


class Shared:
    """The worker of the first process, with one face in all of them.

    The first process says at every step whether there is an update. The others read it
    at the next step, when it has long arrived, so no step waits for it.
    """

    def __init__(self, worker: Worker | None) -> None:
        self._worker = worker
        self._flag: jax.Array | None = None
        devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
        self._mesh = Mesh(devices, ("process", "device"))
        self._any = jax.jit(
            jnp.max, out_shardings=NamedSharding(self._mesh, PartitionSpec())
        )

    def enter(self, params: list[np.ndarray]) -> Update:
        worker = self._worker
        return _broadcast(from_first(lambda: worker and worker.enter(params)))

    def take(self) -> Update | None:
        worker, flag, update = self._worker, self._flag, None
        if flag is not None and np.asarray(flag.addressable_data(0)):
            update = _broadcast(from_first(lambda: worker and worker.take()))
        own = np.array([worker is not None and worker.has_update], np.int32)
        spec = PartitionSpec("process")
        self._flag = self._any(
            multihost_utils.host_local_array_to_global_array(own, self._mesh, spec)
        )
        return update

    def check_tokens(self, tokens: Any) -> float:
        """The first process's tokens of a step; the others' are not looked at."""
        return 1.0 if self._worker is None else self._worker.check_tokens(tokens)

    def submit(self, arrays: list[Any], tokens: float) -> None:
        found = gather(arrays)
        if self._worker is not None:
            self._worker.submit_own(found, tokens)

    def wait(self, seconds: float) -> None:
        if self._worker is not None:
            self._worker.wait(seconds)

    def agreed(self, decision: bool) -> bool:
        return bool(multihost_utils.broadcast_one_to_all(np.int32(decision)))

    @property
    def bytes(self) -> tuple[int, int]:
        return (0, 0) if self._worker is None else self._worker.bytes

    def leave(self) -> None:
        if self._worker is not None:
            self._worker.leave()

    def end(self, seconds: float) -> None:
        if self._worker is not None:
            self._worker.end(seconds)


def _broadcast(update: Update | None) -> Update:
    """The first process's update, in all."""
    own = update or Update(0, 0, None, None, None)
    lists = own.new, own.base
    forms = [x and [[str(y.dtype), y.shape] for y in x] for x in lists]
    *head, forms = json.loads(_broadcast_text(json.dumps([*own[:3], forms])))
    arrays = [
        form and [_broadcast_array(x and x[i], *each) for i, each in enumerate(form)]
        for x, form in zip(lists, forms, strict=True)
    ]
    return Update(*head, *arrays)


def _broadcast_array(own: Any, dtype: str, shape: list[int]) -> np.ndarray:
    size = jnp.dtype(dtype).itemsize * int(np.prod(shape))
    data = None if own is None else as_bytes(own)
    return np.frombuffer(_broadcast_bytes(data, size), jnp.dtype(dtype)).reshape(shape)


def _broadcast_text(text: str) -> bytes:
    """The first process's text; what the others give is not looked at."""
    data = text.encode()
    size = multihost_utils.broadcast_one_to_all(np.int32(len(data)))
    return _broadcast_bytes(data if jax.process_index() == 0 else None, int(size))


def _broadcast_bytes(data: bytes | memoryview | None, size: int) -> bytes:
    """So many bytes of the first process; in pieces of few lengths: each compiles."""
    found = []
    for first in range(0, size, _PIECE):
        count = min(size - first, _PIECE)
        piece = np.zeros(max(1024, 1 << (count - 1).bit_length()), np.uint8)
        if data is not None:
            piece[:count] = np.frombuffer(data, np.uint8, count, first)
        told = multihost_utils.broadcast_one_to_all(piece)
        found.append(np.asarray(told)[:count].tobytes())
    return b"".join(found)
