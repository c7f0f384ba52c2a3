"""A site of several processes: the first of them has the thread, and tells the others.

All that is told goes over the site's own devices, in the thread that calls `sync`, at
calls that all processes make in the same order. So nothing is decided by one process
alone: not what lands at a step, nor what is given, nor an error.
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

from curvadion_jax.sites._messages import RunError
from curvadion_jax.sites._params import Change
from curvadion_jax.sites._worker import News, Worker

T = TypeVar("T")

# Bytes told at once; each device has room for them.
_PIECE = 2**24
_ERRORS = (ImportError, OSError, TypeError, ValueError, RunError)


def of_first(function: Callable[[], T]) -> T | None:
    """What a function returns in the first process, None in the others.

    What it raises, all raise: what it is of `_ERRORS`, or else a `RunError`.
    """
    if jax.process_count() == 1:
        return function()
    found, error = None, None
    if jax.process_index() == 0:
        try:
            found = function()
        except Exception as raised:
            error = raised
    kinds = [kind.__name__ for kind in _ERRORS if isinstance(error, kind)]
    report = [] if error is None else [(kinds or [RunError.__name__])[0], str(error)]
    told = json.loads(_told(json.dumps(report).encode()))
    if error is not None:
        raise error
    if told:
        kind = next(each for each in _ERRORS if each.__name__ == told[0])
        raise kind(f"the first process of this site: {told[1]}")
    return found


def check_alike(what: dict[str, Any]) -> None:
    """Rejects, in all processes, what is not the same in all."""
    number = np.int32(zlib.crc32(json.dumps(what).encode()) >> 1)
    if len(set(multihost_utils.process_allgather(number).tolist())) > 1:
        raise ValueError(
            "all processes of a site must give it the same arguments, and process "
            f"{jax.process_index()} of {jax.process_count()} gives {what}"
        )


def whole(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Arrays in the host's memory, with memory of their own, one after the other."""
    if jax.process_count() == 1:
        return [np.array(x) for x in arrays]
    return [multihost_utils.process_allgather(x, tiled=True) for x in arrays]


class Shared:
    """The worker of the first process, with one face in all of them.

    Whether there are news the first process says at every step; it is read at the next
    one, when it has long come, so that no step waits for it.
    """

    def __init__(self, worker: Worker | None) -> None:
        self._worker = worker
        self._asked: jax.Array | None = None
        self._error: Exception | None = None
        devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
        self._mesh = Mesh(devices, ("process", "device"))
        self._flag = jax.jit(
            jnp.max, out_shardings=NamedSharding(self._mesh, PartitionSpec())
        )

    def enter(self, params: list[np.ndarray]) -> News:
        worker = self._worker
        return _spread(of_first(lambda: worker and worker.enter(params)))

    def take(self) -> News | None:
        worker, asked, news = self._worker, self._asked, None
        if asked is not None and np.asarray(asked.addressable_data(0)):
            news = _spread(of_first(self._taken))
        error = self._error is not None
        self._asked = self._raised(error or (worker is not None and worker.has_news))
        return news

    def _taken(self) -> News | None:
        if self._error is not None:
            raise self._error
        return self._worker and self._worker.take()

    def counted(self, tokens: Any) -> float:
        """The first process's tokens of a step.

        What is wrong with them is told as news are, so that all raise it at one call.
        It stays, and nothing more is posted: the others have counted the step.
        """
        if self._worker is None:
            return 1.0
        try:
            return self._worker.counted(tokens)
        except Exception as error:
            self._error = error
            return 0.0

    def give(self, arrays: list[Any], tokens: float, fragment: int) -> None:
        found = whole(arrays)
        if self._worker is not None and self._error is None:
            self._worker.take_over(found, tokens, fragment)

    def wait(self, seconds: float) -> None:
        if self._worker is not None:
            self._worker.wait(seconds)

    def agreed(self, decision: bool) -> bool:
        return bool(multihost_utils.broadcast_one_to_all(np.int32(decision)))

    @property
    def bytes(self) -> tuple[int, int]:
        return (0, 0) if self._worker is None else self._worker.bytes

    def ask_for_snapshot(self) -> None:
        if self._worker is not None:
            self._worker.ask_for_snapshot()

    def leave(self) -> None:
        if self._worker is not None:
            self._worker.leave()

    def end(self, seconds: float) -> None:
        if self._worker is not None:
            self._worker.end(seconds)

    def _raised(self, flag: bool) -> jax.Array:
        """Whether any process says so, on all devices; nothing waits for it."""
        spec = PartitionSpec("process")
        own = np.array([flag], np.int32)
        given = multihost_utils.host_local_array_to_global_array(own, self._mesh, spec)
        return self._flag(given)


def _spread(news: News | None) -> News:
    """The first process's news, in all."""
    found = news or News([], None, 0, 0)
    head = [*found[1:], [[c.leaf, c.counted, *_forms(c)] for c in found.changes]]
    outcome, number, contributors, forms = json.loads(_told(json.dumps(head).encode()))
    changes = []
    for place, (leaf, counted, base, new) in enumerate(forms):
        own = found.changes[place] if news else None
        arrays = [
            None if form is None else _array(own and own[index], *form)
            for index, form in ((1, base), (2, new))
        ]
        changes.append(Change(leaf, arrays[0], arrays[1], counted))  # pyright: ignore
    return News(changes, outcome, number, contributors)


def _forms(change: Change) -> list[Any]:
    pair = change.base, change.new
    return [None if x is None else [str(x.dtype), list(x.shape)] for x in pair]


def _array(own: Any, dtype: str, shape: list[int]) -> np.ndarray:
    size = jnp.dtype(dtype).itemsize * int(np.prod(shape))
    data = None if own is None else np.ascontiguousarray(own).tobytes()
    return np.frombuffer(_bytes(data, size), jnp.dtype(dtype)).reshape(shape)


def _told(data: bytes) -> bytes:
    """The first process's bytes; what the others give is not looked at."""
    size = multihost_utils.broadcast_one_to_all(np.int32(len(data)))
    return _bytes(data if jax.process_index() == 0 else None, int(size))


def _bytes(data: bytes | None, size: int) -> bytes:
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
