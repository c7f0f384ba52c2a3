"""What a user gives: checked when a site is made, and when it starts."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax.sites import _arrays
from curvadion_jax.sites._headers import NAME

# Seconds of the longest pause between looks at the store.
_DAY = 86400.0


def check_url(url: Any) -> None:
    """Rejects no URL, which is often a variable that is not set."""
    if url is None or url == "":
        raise ValueError(
            f"url is {url!r}. Give a bucket's URL such as 's3://bucket/run-7', a "
            "folder, or a store of obstore."
        )


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"name must have 1 to 64 letters, digits, '-' and '_', got {name!r}. "
            "The first must be a letter or digit."
        )


def check_count(value: Any, what: str) -> None:
    """Rejects what is not a whole number of 1 or more."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{what} must be at least 1 and a Python int, got {value!r}. "
            "Pass a whole number."
        )


def check_at_least_zero(value: Any, what: str) -> None:
    """Rejects negative numbers, NaN, and what is no number."""
    if not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise ValueError(
            f"{what} must be a number of at least 0, got {value!r}. Pass 0 not to "
            "wait, or math.inf to wait without a limit."
        )


def check_poll(value: Any) -> None:
    """Rejects pauses without an end, and those without a length."""
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= _DAY:
        raise ValueError(
            f"poll must be above 0 and at most {_DAY:g} seconds, got {value!r}. Pass "
            "the seconds between two looks at the store."
        )


def check_compressor(compressor: Any) -> None:
    if compressor is not None and getattr(compressor, "codec", None) is None:
        raise ValueError(
            f"compressor is {compressor!r:.99} and has no codec, with which sites read "
            "each other's contributions. Pass quantize(...), exact(), or a Compressor "
            "with one."
        )


def check_params(params: Any) -> None:
    """Rejects what is not trained, and what this site's processes do not all hold."""
    if jax.tree.leaves(params) == []:
        raise ValueError(
            f"params are {params!r:.99}, without an array. Give the tree of arrays "
            "that is trained."
        )
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        try:
            dtype: Any = _arrays.to_numpy(x).dtype if not _is_jax(x) else x.dtype
        except TypeError:
            dtype = type(x).__name__
        if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name} is {dtype}, and no floating-point array. Give the "
                "parameters alone, without the optimizer's state."
            )
        if dtype == jnp.float64 != jnp.result_type(float):  # JAX would halve it
            raise TypeError(
                f"{name} is float64, which JAX computes in if it is told to. Give "
                "float32, or call jax.config.update('jax_enable_x64', True) first."
            )
        if not _arrays.can_return(x):
            raise TypeError(
                f"{name} is a {type(x).__name__}, whose library makes nothing of a "
                "NumPy array (from_dlpack, asarray). Give NumPy arrays."
            )
        devices = x.sharding.device_set if _is_jax(x) else set()
        processes = {device.process_index for device in devices}
        if jax.process_count() > 1 and len(processes) != jax.process_count():
            raise ValueError(
                f"{name} lies on devices of some of this site's {jax.process_count()} "
                "processes. Give parameters on a mesh of all devices."
            )


def check_same(params: Any, known: Any) -> None:
    """Rejects a tree of another structure, shapes or dtypes than a known one.

    None in place of an array is another structure. Dtypes are compared where they are
    those of NumPy.
    """
    leaves, structure = jax.tree.flatten(params)
    if structure != jax.tree.structure(known):
        raise ValueError(
            f"params have the structure {structure!s:.300}, and had "
            f"{jax.tree.structure(known)!s:.300} when the site started. Give the same "
            "tree of arrays; another model needs another URL."
        )
    for x, (path, like) in zip(leaves, jax.tree.leaves_with_path(known), strict=True):
        found = tuple(getattr(x, "shape", like.shape)), like.dtype
        if isinstance(x, (np.ndarray, np.generic, jax.Array)):
            found = x.shape, x.dtype
        if found != (like.shape, like.dtype):
            raise ValueError(
                f"Parameter {jax.tree_util.keystr(path)} is {found[1]}{[*found[0]]}, "
                f"and was {like.dtype}{[*like.shape]} when the site started. Give the "
                "same tree of arrays; another model needs another URL."
            )


def _is_jax(x: Any) -> bool:
    return isinstance(x, jax.Array)
