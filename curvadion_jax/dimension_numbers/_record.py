"""What a state remembers of the partition that it was made with.

A record is a dictionary of one key, the partition as JSON, and no value. So JAX takes
states of two partitions for two structures, and what stores trees stores it too.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax import _trees
from curvadion_jax._matrix_view import MatrixView
from curvadion_jax.dimension_numbers._partition import (
    DimensionNumbers,
    as_argument,
    axes_of,
)


class Line(NamedTuple):
    """Of one parameter: the axes of a matrix, or None for the other optimizer's."""

    path: str
    shape: list[int]
    reduction: list[int] | None
    output: list[int] | None

    def __str__(self) -> str:
        if self.numbers is None:
            return "left to the other optimizer"
        reduction, output = self.numbers
        return f"a matrix ({reduction} -> {output}) of {tuple(self.shape)}"

    @property
    def numbers(self) -> DimensionNumbers | None:
        if self.reduction is None or self.output is None:
            return None
        return DimensionNumbers(axes_of(self.reduction), axes_of(self.output))


def record(params: Any, views: Mapping[str, MatrixView | None]) -> Any:
    """The record of these parameters, by their views."""
    if not jax.tree.leaves(params):  # as where Optax looks for what is like them
        return jnp.zeros([])
    lines = []
    for path, leaf in _trees.leaves_with_path(params):
        view = views[path]
        sides = view.sides if view else (None, None)
        lines.append([path, leaf.shape, *sides])
    return {json.dumps(lines): None}


def lines_of(found: Any) -> list[list[Any]]:
    """The lines of a record, in the types of JSON; none if there is no record."""
    return json.loads(next(iter(found))) if isinstance(found, dict) and found else []


def check(saved: Any, now: Any) -> None:
    """Rejects a state whose record is not that of now."""
    if differs := difference(lines_of(saved), lines_of(now)):
        raise ValueError(f"The state was made with another partition: {differs}")


def difference(saved: list[list[Any]], now: list[list[Any]]) -> str:
    """What differs between lines, and how to keep what was.

    Empty if nothing does, or if there are no lines to compare.
    """
    old, new = ({path: Line(path, *rest) for path, *rest in x} for x in (saved, now))
    changed = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    if not (old and new and changed):
        return ""
    shown = "; ".join(
        f"{path} was {old.get(path, 'missing')} and is now {new.get(path, 'missing')}"
        for path in changed[:5]
    )
    if len(changed) > 5:
        shown += f"; and {len(changed) - 5} more"
    answers = {path: old[path].numbers for path in changed if path in old}
    return (
        f"{shown}. Give the dimension numbers that it was made with, by "
        f"from_loss(..., {as_argument(answers)})."
    )
