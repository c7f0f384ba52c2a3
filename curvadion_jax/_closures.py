"""What a function closes over."""

import contextlib
import functools
import types
from typing import Any

import jax
from jax.core import Tracer


def reaches_tracers(function: Any) -> bool:
    """Whether a function closes over values that are being traced.

    Directly, or through the functions, trees and objects that it closes over.
    """
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        x = waiting.pop()
        if isinstance(x, Tracer):
            return True
        if id(x) not in seen:
            seen.add(id(x))
            waiting.extend(_held_by(x))
    return False


def _held_by(x: Any) -> list[Any]:
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        found = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        for cell in x.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                found.append(cell.cell_contents)
        return found
    if hasattr(x, "__wrapped__"):  # as jitted functions have
        return [x.__wrapped__]
    if isinstance(x, jax.Array | types.ModuleType | type | str | bytes):
        return []
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    return list(getattr(x, "__dict__", {}).values())
