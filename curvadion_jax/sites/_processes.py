"""A site of several processes: the first talks to the store, and tells the others.

It does so over the site's own devices, in the thread that calls `sync`, at calls that
all processes make in the same order. So no process decides alone what lands at a step,
what is submitted, or what is raised.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

# Bytes broadcast at once; each device has room for them.
_PIECE = 2**24
# Errors that another process can unpickle.
_ERRORS = (ImportError, OSError, RuntimeError, TypeError, ValueError)


def from_first(function: Callable[[], Any]) -> Any:
    """Returns or raises in all processes what a function does in the first."""
    if jax.process_count() == 1:
        return function()
    data = b""
    if jax.process_index() == 0:
        try:
            found = function()
        except Exception as error:
            known = isinstance(error, _ERRORS)
            found = error if known else RuntimeError(repr(error))
        data = pickle.dumps(found)
    found = pickle.loads(_broadcast(data))
    if isinstance(found, Exception):
        raise found
    return found


def gather(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Copies arrays to the host, one after the other."""
    if jax.process_count() == 1:
        return [np.array(x) for x in arrays]
    return [process_allgather(x, tiled=True) for x in arrays]


def _broadcast(data: bytes) -> bytes:
    """Bytes of the first process, in pieces of few lengths, since each compiles."""
    # Two numbers, since 32 bits are too few for the size of a model.
    pieces, rest = broadcast_one_to_all(
        np.array(divmod(len(data), _PIECE), np.int32)
    ).tolist()
    found = []
    for first in range(0, pieces * _PIECE + rest, _PIECE):
        count = min(pieces * _PIECE + rest - first, _PIECE)
        piece = np.zeros(max(1024, 1 << (count - 1).bit_length()), np.uint8)
        if jax.process_index() == 0:
            piece[:count] = np.frombuffer(data, np.uint8, count, first)
        found.append(np.asarray(broadcast_one_to_all(piece))[:count].tobytes())
    return b"".join(found)
