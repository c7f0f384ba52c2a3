"""Whether state is alive, and has its replica axis."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def is_array(x: Any) -> bool:
    """Whether it is an array on devices."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _is_deleted(x: Any) -> bool:
    return is_array(x) and x.is_deleted()


def check_alive(tree: Any, what: str) -> None:
    """Rejects arrays that were donated to a step."""
    if any(map(_is_deleted, jax.tree.leaves(tree))):
        paths = jax.tree.leaves_with_path(tree)
        path = next(path for path, leaf in paths if _is_deleted(leaf))
        raise ValueError(
            f"the {what}{jax.tree_util.keystr(path)} was used in an earlier step, "
            "which reused its memory: use the state that that step returned, or "
            "make the step with donate=False"
        )


def count_leading(tree: Any, what: str) -> int:
    """Length of the leading axis of the first leaf, where no array was donated."""
    check_alive(tree, what)
    leaves = jax.tree.leaves_with_path(tree)
    path, leaf = leaves[0] if leaves else ((), None)
    if leaf is None or not np.shape(leaf):
        found = "a tree without arrays" if leaf is None else f"{leaf!r}"
        raise ValueError(
            f"the {what}{jax.tree_util.keystr(path)} must have a leading replica axis, "
            f"got {found}: give what replicas.replicate or a step returned"
        )
    return np.shape(leaf)[0]


def check_leading(tree: Any, number: int, what: str, need: str) -> None:
    """Rejects a tree of which a leaf lacks the replica axis."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        shape = np.shape(leaf)
        if not shape or shape[0] != number:
            raise ValueError(
                f"the {what}{jax.tree_util.keystr(path)} has shape {shape}, and not a "
                f"leading axis of {number} {need}"
            )
