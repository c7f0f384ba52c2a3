"""Where in the user's code an equation is from."""

import os
from collections.abc import Sequence
from typing import Any

_OWN = [os.path.dirname(__file__), "/jax/_src/", "<"]
# Users look for a product in their model, and not in a library's layer.
_LIBRARIES = [
    f"site-packages/{name}/" for name in ("jax", "flax", "haiku", "equinox", "optax")
]


def where(path: Sequence[Any]) -> str:
    """The innermost line of the user's code, such as ``'model.py:63'``.

    Args:
      path: an equation after the calls that it is within. JAX keeps for an equation
        only the lines within the function that was jitted.

    Returns:
      The line; of a library if no code of the user's calls it; empty if JAX has none.
    """
    frames = [frame for equation in reversed(path) for frame in _frames(equation)]
    is_of = lambda frame, folders: any(part in frame.file_name for part in folders)
    frames = [frame for frame in frames if not is_of(frame, _OWN)]
    users = [frame for frame in frames if not is_of(frame, _LIBRARIES)]
    for frame in users or frames:
        return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def _frames(equation: Any) -> list[Any]:
    """The frames of Python in which JAX made the equation, the innermost one first."""
    traceback = equation.source_info.traceback
    return list(traceback.frames) if traceback else []
