"""What a state remembers of the partition that it was made with.

A record is a dictionary of one key, the partition as JSON, and no value. So JAX takes
states of two partitions for two structures, and what stores trees stores it too.
"""

import json
from collections.abc import Mapping, Sequence
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
    changed = [path for path in {**old, **new} if _differ(path, old, new)]
    if not (old and new and changed):
        return ""
    shapes = [
        {path: tuple(x.shape) for path, x in lines.items()} for lines in (old, new)
    ]
    if others := [path for path in changed if _differ(path, *shapes)]:
        return (
            f"{_changes(others, *shapes)}. These are other parameters: call init for "
            "them. Of a checkpoint restore the parameters alone, with partial=True."
        )
    answers = {path: old[path].numbers for path in changed}
    return (
        f"{_changes(changed, old, new)}. Give the dimension numbers that it was made "
        f"with, by from_loss(..., {as_argument(answers)})."
    )


def _differ(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return old.get(path) != new.get(path)


def _changes(
    paths: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any]
) -> str:
    """What these were and are, of the first five."""
    shown = [
        f"{path} was {old.get(path, 'missing')} and is now {new.get(path, 'missing')}"
        for path in paths[:5]
    ]
    if len(paths) > 5:
        shown.append(f"and {len(paths) - 5} more")
    return "; ".join(shown)
