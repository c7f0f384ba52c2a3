"""Names of parameters: their paths in a tree, joined by slashes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

Names = tuple[str, ...]


def is_box(node: Any) -> bool:
    """Whether a node is Flax's box around one array: an nnx variable, or linen's.

    Its `value` is not part of a name. By the class names, because Flax is not a
    dependency; a path cannot tell it from a field `value` next to `query` and `key`.
    """
    return any(
        base.__name__ in ("Variable", "VariableState", "AxisMetadata")
        and base.__module__.partition(".")[0] == "flax"
        for base in type(node).__mro__
    )


def leaves_with_names(tree: Any) -> list[tuple[Names, Any]]:
    """The names along the path of every leaf, and the leaf."""
    found = []
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_box):
        for inner, leaf in jax.tree.leaves_with_path(node):
            # Without the `value` of a box.
            found.append((names_of((*path, *inner[1:])), leaf))
    return found


def names_of(path: Sequence[Any]) -> Names:
    """The names along a path of JAX's keys."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The path of every leaf, such as 'layers/attention/kernel', and the leaf."""
    return [("/".join(names), leaf) for names, leaf in leaves_with_names(tree)]


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps a function of the path and the leaf."""
    results = [function(path, leaf) for path, leaf in leaves_with_path(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), results)
