"""Finds the momentum in the state of any optimizer.

How much it changes (RMMC) is `triggers.relative_momentum_change`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from curvadion_jax import _trees

_FIELDS = ("momentum", "trace", "mu")


def _field_names(node: Any) -> tuple[str, ...]:
    """The fields of a named tuple or of a dataclass."""
    if isinstance(node, tuple):
        return getattr(node, "_fields", ())
    if dataclasses.is_dataclass(node):
        return tuple(field.name for field in dataclasses.fields(node))
    return ()


def _outermost(state: optax.OptState, *fields: str) -> list[Any]:
    """The outermost nodes that have one of these fields, and all other leaves.

    Nodes below them are left out: parameters may have fields of these names too.
    """
    return jax.tree.leaves(
        state, is_leaf=lambda node: not set(fields).isdisjoint(_field_names(node))
    )


def value_of(state: optax.OptState, field: str) -> Any:
    """The field of the only node that has it; None if none has it, or several have."""
    found = [node for node in _outermost(state, field) if field in _field_names(node)]
    return getattr(found[0], field) if len(found) == 1 else None


def momentum_by_name(state: Any, views: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The momenta by the paths of parameters: Dion's, else `trace`, else `mu`."""
    nodes = _outermost(state, *_FIELDS)
    named = [
        (field, dict(_trees.leaves_with_path(getattr(node, field))))
        for field in _FIELDS
        for node in nodes
        if field in _field_names(node)
    ]
    # Parameters may be a named tuple with such a field, whose leaves have other paths.
    # (Under `optax.flatten` no momentum has the path of a parameter.)
    of_parameters = [each for each in named if each[1].keys() <= views.keys()]
    found = of_parameters or named
    if found:
        first_field = found[0][0]
        momenta = {}
        for field, by_path in found:
            if field == first_field:
                momenta |= by_path
        return momenta
    raise ValueError(
        "The inner optimizer keeps no momentum: its state has no field named "
        f"{', '.join(map(repr, _FIELDS))}. Use an optimizer with momentum, or a "
        "trigger that needs none, such as every_k."
    )
