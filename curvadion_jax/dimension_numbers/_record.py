"""What a state remembers of the partition that it was made with."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from curvadion_jax import _trees
from curvadion_jax._matrix_view import MatrixView
from curvadion_jax.dimension_numbers._partition import DimensionNumbers, as_argument


class Line(NamedTuple):
    """Of one parameter: the axes of a matrix, or None for the other optimizer's."""

    path: str
    shape: tuple[int, ...]
    reduction: tuple[int, ...] | None
    output: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.numbers is None:
            return "left to the other optimizer"
        reduction, output = self.numbers
        return f"a matrix ({reduction} -> {output}) of {self.shape}"

    @property
    def numbers(self) -> DimensionNumbers | None:
        if self.reduction is None or self.output is None:
            return None
        one_or_more = lambda axes: axes if len(axes) > 1 else axes[0]
        return DimensionNumbers(one_or_more(self.reduction), one_or_more(self.output))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """The partition that a state was made with: a node of the state, without arrays.

    So JAX takes states of two partitions for two structures, and a checkpoint can keep
    it. A record without lines equals every other one: `optax.tree.map_params` compares
    a state with one that was made of no parameters.

    Attributes:
      lines: one for each parameter.
    """

    lines: tuple[Line, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        same = self.lines is other.lines or self.lines == other.lines
        return same or not (self.lines and other.lines)

    def __hash__(self) -> int:
        return hash(Record)


def record(params: Any, views: Mapping[str, MatrixView | None]) -> Record:
    """The record of these parameters, by their views."""

    def line(path: str, leaf: Any) -> Line:
        view = views[path]
        sides = (view.fan_in_axes, view.fan_out_axes) if view else (None, None)
        return Line(path, tuple(leaf.shape), *sides)

    return Record(tuple(line(*each) for each in _trees.leaves_with_path(params)))


def to_json(found: Record) -> list[Any]:
    """Lists, as JSON has them."""
    as_list = lambda axes: axes if axes is None else list(axes)
    return [[line.path, *map(as_list, line[1:])] for line in found.lines]


def from_json(lines: list[Any]) -> Record:
    as_tuple: Any = lambda axes: axes if axes is None else tuple(axes)
    return Record(tuple(Line(path, *map(as_tuple, rest)) for path, *rest in lines))


def difference(saved: Record, now: Record) -> str:
    """What differs, in words; and how to keep what was. Empty if nothing does."""
    if saved == now:
        return ""
    old, new = ({line.path: line for line in each.lines} for each in (saved, now))
    changed = [path for path in {**old, **new} if old.get(path) != new.get(path)]
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


def check(saved: Record, now: Record) -> None:
    """Rejects a state that was made with another partition."""
    if differs := difference(saved, now):
        raise ValueError(f"The state was made with another partition: {differs}")
