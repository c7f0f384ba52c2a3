"""Arrays of any library, as NumPy arrays of the host, and back.

A training program's arrays are those of JAX, of NumPy, or any with `__dlpack__` or
`__array__`, such as PyTorch's tensors. No other library is imported: what an array
cannot do itself, the top module of its class does.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

Arrays = list[np.ndarray]


def to_numpy(x: Any) -> np.ndarray:
    """An array on the host, which shares memory where it can.

    Raises:
      TypeError: if it is no array.

    Example:
      >>> to_numpy(jax.numpy.ones(2, jax.numpy.bfloat16)).dtype
      dtype(bfloat16)
    """
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return np.asarray(x)
    if hasattr(x, "detach"):  # PyTorch shares no memory of what has a gradient
        x = x.detach()
    if hasattr(x, "cpu"):
        x = x.cpu()
    if not hasattr(x, "__dlpack__"):
        if not hasattr(x, "__array__"):
            raise TypeError(f"{type(x).__name__} is no array.")
        return np.asarray(x)
    try:
        return np.from_dlpack(x)
    except (RuntimeError, BufferError):  # NumPy (BufferError: 2.5) knows no bfloat16
        return np.asarray(jax.dlpack.from_dlpack(x))


def can_return(x: Any) -> bool:
    """Whether there is a way back from a NumPy array."""
    if isinstance(x, (np.ndarray, np.generic, jax.Array)):
        return True
    return hasattr(_library(x), "from_dlpack") or hasattr(_library(x), "asarray")


def like(array: np.ndarray, x: Any) -> Any:
    """A copy of an array, of another array's kind and place. It may be donated."""
    if isinstance(x, jax.Array):
        return jax.make_array_from_callback(
            array.shape, x.sharding, lambda index: array[index].copy()
        )
    array = array.copy()
    if isinstance(x, (np.ndarray, np.generic)):
        return array
    library = _library(x)
    if not hasattr(library, "from_dlpack"):
        return library.asarray(array)
    if array.dtype == ml_dtypes.bfloat16:  # which goes as another type of 16 bits
        found = library.from_dlpack(array.view(np.int16)).view(x.dtype)
    else:
        found = library.from_dlpack(array)
    return found.to(x.device) if hasattr(found, "to") else found


def copy(x: Any) -> Any:
    """A copy that nobody else holds, of a JAX array where it lies."""
    if isinstance(x, jax.Array):
        return jax.numpy.copy(x)
    return np.array(to_numpy(x))


def use_no_accelerator(arrays: Sequence[Any]) -> None:
    """Keeps JAX from the devices of a program that does not train with JAX.

    JAX takes hold of all of a machine's accelerators when it starts, whatever it is
    asked to do.
    """
    if arrays and not any(isinstance(x, jax.Array) for x in arrays):
        jax.config.update("jax_platforms", "cpu")


def _library(x: Any) -> Any:
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules[type(x).__module__.partition(".")[0]]


def to_host(tree: Any) -> Arrays:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within it JAX computes on the host's CPU, on whatever the program trains.

    A mesh that the program has set would win over a default device, and its axes would
    be those of abstract arrays, so this sets one.
    """
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device), jax.set_mesh(Mesh([device], ("cpu",))):
        yield


def wide(dtype: Any) -> np.dtype:
    """The dtype to compute in: at least float32."""
    return np.promote_types(np.float32, dtype)


def cast(arrays: Arrays, like: Sequence[Any]) -> Arrays:
    """The arrays in the dtypes of others; not copied where they have them."""
    with np.errstate(over="ignore"):  # what becomes Inf is found by who checks it
        pairs = zip(arrays, like, strict=True)
        return [x.astype(other.dtype, copy=False) for x, other in pairs]
