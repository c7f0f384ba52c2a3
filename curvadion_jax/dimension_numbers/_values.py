"""What the reader knows of a value: what it is made of, and where axes lie in it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeGuard

from curvadion_jax.dimension_numbers import _axes
from curvadion_jax.dimension_numbers._axes import NONE, Axes, Dims
from curvadion_jax.dimension_numbers._uses import Use


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A parameter whose axes are followed through a value.

    Attributes:
      dims: for each axis of the value, which axes of the parameter lie along it.
      parameter: the parameter's number, in the order of the leaves.
    """

    dims: Dims
    parameter: int

    @property
    def is_lost(self) -> bool:
        """Whether it is not known any more where the axes lie; `dims` is then ()."""
        return False

    def at(self, places: Iterable[int]) -> Axes:
        """The parameter's axes that lie along these axes of the value."""
        return NONE if self.is_lost else _axes.axes_at(self.dims, places)

    @property
    def all_axes(self) -> Axes:
        """The parameter's axes that lie along any axis of the value."""
        return self.at(range(len(self.dims)))

    @property
    def covered(self) -> frozenset[int]:
        """The axes of the value along which it varies, as far as is known."""
        dims = enumerate(self.dims)
        return frozenset(d for d, dim in dims if dim and not _axes.is_repeated(dim))

    @property
    def is_cut(self) -> bool:
        """Whether only a part of the parameter is in the value."""
        atoms = (atom for dim in self.dims for atom in dim)
        return any(atom.axis >= 0 and atom.size is None for atom in atoms)

    def moved(self, move: Callable[[Dims], Dims]) -> Self:
        """The same after the value's axes have moved."""
        if self.is_lost:
            return self
        return dataclasses.replace(self, dims=move(self.dims))


@dataclasses.dataclass(frozen=True)
class Weight(Tracked):
    """A parameter in a value that is made of parameters and constants alone.

    Attributes:
      stack: axes of the parameter that have left the value, because one place of each
        was taken: by an index, or by a scan.
      lost: empty, or what it was that lost the axes, such as ``'sort'``.
    """

    stack: Axes = NONE
    lost: str = ""

    @property
    def is_lost(self) -> bool:
        return bool(self.lost)

    def lose(self, why: str) -> "Weight":
        return dataclasses.replace(self, dims=(), lost=why)

    def picked(self, places: Iterable[int]) -> "Weight":
        """The same after single places along these axes of the value were taken."""
        return dataclasses.replace(self, stack=self.stack | self.at(places))


@dataclasses.dataclass(frozen=True)
class Output(Tracked):
    """The outputs of a layer, as long as their axes can be told apart.

    Attributes:
      use: the product that made them; `dims` has the output axes of its parameter.
      taken: output axes of which one place was taken.
    """

    use: Use
    taken: Axes = NONE


@dataclasses.dataclass(frozen=True)
class Mixed(Tracked):
    """A parameter that was added to data, or multiplied with them, by elements.

    A product with other data would make a matrix of it, as in ``x @ (w + change)``.

    Attributes:
      is_factor: whether it was multiplied. Then a sum over an axis makes a product, as
        in ``(x[:, None] * w).sum(0)``.
    """

    is_factor: bool


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program that depends on parameters or data.

    Attributes:
      kind: ``'weight'`` if it is made of parameters, ``'data'`` if of the loss's other
        arguments, and ``'activation'`` if of both.
      tracked: every parameter of a weight, as `Weight`; of an activation the `Output`
        and `Mixed` whose axes are known.
      open: products of which it is made, and that no product has followed yet.
      is_indicator: whether it tells which numbers are equal, as one-hot vectors do;
        None if it may.
    """

    kind: str
    tracked: tuple[Tracked, ...] = ()
    open: frozenset[Use] = frozenset()
    is_indicator: bool | None = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(x for x in self.tracked if isinstance(x, Weight))

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(x for x in self.tracked if isinstance(x, Output))

    @property
    def factors(self) -> tuple[Mixed, ...]:
        return tuple(x for x in self.tracked if isinstance(x, Mixed) and x.is_factor)

    def moved(self, move: Callable[[Dims], Dims]) -> "Value":
        """The value after its axes have moved."""
        tracked = unique(x.moved(move) for x in self.tracked)
        return dataclasses.replace(self, tracked=tracked)


Values = Sequence[Value | None]
"""The operands or the results of an equation. None is a constant."""


def is_weight(value: Value | None) -> TypeGuard[Value]:
    return value is not None and value.kind == "weight"


def is_data(value: Value | None) -> TypeGuard[Value]:
    """Whether the loss's arguments are in it, with parameters or without."""
    return value is not None and value.kind in ("data", "activation")


def is_given(value: Value | None) -> bool:
    """Whether no parameter is in it: a constant, or the loss's other arguments."""
    return value is None or value.kind == "data"


def activation(values: Values, tracked: Iterable[Tracked] = ()) -> Value:
    """The result of an equation that has data among its operands."""
    kinds = {value.kind for value in values if value}
    kind = "data" if kinds == {"data"} else "activation"
    return Value(kind, unique(tracked), open_of(values))


def with_indicators(result: Value, values: Values) -> Value:
    """The result, which may be one-hot vectors if it is made of these and constants."""
    known = [x.is_indicator for x in values if x]
    may_be = None if known and False not in known else False
    return dataclasses.replace(result, is_indicator=may_be)


def weights_of(values: Values) -> list[Weight]:
    """The parameters of all values that are made of parameters."""
    return [x for value in values if value for x in value.weights]


def open_of(values: Values) -> frozenset[Use]:
    return frozenset().union(*(value.open for value in values if value))


def unique(several: Iterable[Tracked]) -> tuple[Tracked, ...]:
    return tuple(dict.fromkeys(several))


def merged(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The parameters of a sum. One that is lost in a term may be known in another."""
    several = dict.fromkeys(weights)
    known = {x.parameter for x in several if not x.is_lost}
    return tuple(x for x in several if not (x.is_lost and x.parameter in known))
