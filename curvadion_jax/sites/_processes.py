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

from curvadion_jax.sites import _arrays

# KiB broadcast at once; each device has room for them.
_PIECE = 2**14
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
    found = pickle.loads(_broadcast(data))  # which ignores zeros after the end
    if isinstance(found, Exception):
        raise found
    return found


def copies(arrays: Sequence[Any]) -> list[Any]:
    """Copies of arrays where they lie; of several processes on the host of each."""
    if jax.process_count() == 1:  # one by one: they may lie on different devices
        return [_arrays.copy(x) for x in arrays]
    return [process_allgather(x, tiled=True) for x in arrays]


def _broadcast(data: bytes) -> bytes:
    """Bytes of the first process, and zeros: few lengths, since each compiles."""
    # In KiB, since 32 bits are too few for the bytes of a model.
    length = int(broadcast_one_to_all(np.int32(-(-len(data) // 1024))))
    piece = min(_PIECE, 1 << (length - 1).bit_length())
    data = data.ljust(-(-length // piece) * piece * 1024, b"\0")
    pieces = np.frombuffer(data, np.uint8).reshape(-1, piece * 1024)
    return b"".join(np.asarray(broadcast_one_to_all(x)).tobytes() for x in pieces)
