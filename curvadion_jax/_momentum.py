"""Where an optimizer's state keeps its momentum, and which leaves those are."""

from typing import Any

import jax
import optax

from curvadion_jax import _partition

_FIELDS = ("momentum", "trace", "mu")


def _field(path: tuple[Any, ...], field: str) -> int | None:
    """Where along a key path a named tuple's field of that name is."""
    for index, entry in enumerate(path):
        if isinstance(entry, jax.tree_util.GetAttrKey) and entry.name == field:
            return index
    return None


def find_field(state: optax.OptState) -> str | None:
    """Name of the field that holds the momentum: Dion's, else `trace`, else `mu`."""
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    for field in _FIELDS:
        if any(_field(path, field) is not None for path in paths):
            return field
    return None


def is_in_field(path: tuple[Any, ...], field: str | None) -> bool:
    """Whether the leaf at this path of an optimizer state lies in that field."""
    return field is not None and _field(path, field) is not None


def momentum_by_name(
    state: optax.OptState, field: str | None = None
) -> dict[str, jax.Array]:
    """Path of the parameter -> its momentum, in that field or the one found.

    Raises:
      ValueError: if no field is named and the state has no field `momentum`, `trace`
        or `mu`.
    """
    field = find_field(state) if field is None else field
    if field is None:
        raise ValueError(
            "the inner optimizer keeps no momentum: its state has no field named "
            f"{', '.join(map(repr, _FIELDS))}. Use an inner optimizer with momentum, a "
            "trigger that needs none (every_k, always), or pass momentum_fn"
        )
    found = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        index = _field(path, field)
        if index is not None:
            found[_partition.path_name(path[index + 1 :])] = leaf
    return found
