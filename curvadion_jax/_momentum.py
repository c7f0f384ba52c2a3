"""Where an optimizer's state keeps its momentum, and which leaves those are."""

import dataclasses
from typing import Any

import jax
import optax

from curvadion_jax import _paths

_FIELDS = ("momentum", "trace", "mu")


def _names(node: Any) -> tuple[str, ...]:
    """Fields of a state: those of a named tuple or of a dataclass."""
    if isinstance(node, tuple):
        return getattr(node, "_fields", ())
    if dataclasses.is_dataclass(node):
        return tuple(field.name for field in dataclasses.fields(node))
    return ()


def _outermost(state: optax.OptState, *fields: str | None) -> list[Any]:
    """Leaves, and the outermost nodes that have one of these fields.

    Not what lies below them: parameters may have fields of these names too.
    """
    return jax.tree.leaves(
        state, is_leaf=lambda node: not set(fields).isdisjoint(_names(node))
    )


def find_field(state: optax.OptState) -> str | None:
    """Name of the field that holds the momentum: Dion's, else `trace`, else `mu`."""
    nodes = _outermost(state, *_FIELDS)
    for field in _FIELDS:
        if any(field in _names(node) for node in nodes):
            return field
    return None


def in_field(
    state: optax.OptState, field: str | None, beside: tuple[str, ...] = _FIELDS
) -> list[bool]:
    """For every leaf of an optimizer's state whether it lies in that field.

    Args:
      state: the optimizer's state.
      field: the field's name; None is in no state.
      beside: fields that tell a state; what lies below one of them is no state.
    """
    found = []
    for node in _outermost(state, *beside, field):
        for path, _ in jax.tree.leaves_with_path(node):
            found.append(bool(path) and getattr(path[0], "name", None) == field)
    return found


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
    return {
        name: leaf
        for node in _outermost(state, *_FIELDS, field)
        if field in _names(node)
        for name, leaf in _paths.leaves_with_path(getattr(node, field))
    }
