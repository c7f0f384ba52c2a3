"""What is known of a value in a program, and of the uses of a parameter."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self, TypeGuard

from curvadion_jax.dimension_numbers import _axes
from curvadion_jax.dimension_numbers._axes import Axes, Dims

NONE: Axes = frozenset()


class Use(NamedTuple):
    """What an equation does with a parameter.

    Attributes:
      equation: its identity.
      parameter: the number of the parameter.
      kind: ``'product'`` or ``'convolution'`` with data; ``'lookup'`` of rows at places
        that data tell, or ``'constant lookup'``; ``'elementwise'``, or ``'constant'``
        after a product with a constant; ``'number'``, made of all of its elements, such
        as a norm or a penalty; or ``'unknown'``.
      inputs, outputs, stack: of a product, the parameter's axes that it sums over, that
        it keeps, and that it runs over in step with another array.
      vectors: how many vectors a matrix is multiplied with.
      is_part: whether it is a product of a part of the parameter.
      why: what the equation is, in words.
      where: its line, such as ``'model.py:63'``.
    """

    equation: int
    parameter: int
    kind: str
    inputs: Axes
    outputs: Axes
    stack: Axes
    vectors: int
    is_part: bool
    why: str
    where: str


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A parameter, or what a product has made of one, within a value.

    Attributes:
      dims: where the parameter's axes lie in the value.
      parameter: its number.
    """

    dims: Dims
    parameter: int

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows any more where the axes lie."""
        return False

    def at(self, places: Iterable[int]) -> Axes:
        """The parameter's axes at these axes of the value."""
        return NONE if self.is_lost else _axes.axes_at(self.dims, places)

    @property
    def all_axes(self) -> Axes:
        return self.at(range(len(self.dims)))

    @property
    def covered(self) -> frozenset[int]:
        """The axes of the value along which it varies, as far as is known."""
        dims = enumerate(self.dims)
        return frozenset(d for d, dim in dims if dim and not _axes.is_repeated(dim))

    @property
    def is_cut(self) -> bool:
        """Whether a part of the parameter is missing."""
        atoms = (atom for dim in self.dims for atom in dim)
        return any(atom.axis >= 0 and atom.size is None for atom in atoms)

    def moved(self, move: Callable[[Dims], Dims]) -> Self:
        """The same after the value's axes have moved."""
        if self.is_lost:
            return self
        return dataclasses.replace(self, dims=move(self.dims))


@dataclasses.dataclass(frozen=True)
class Weight(Tracked):
    """A parameter in a value that is made of parameters alone.

    Attributes:
      stack: axes that are gone because one place of each was taken, as in a scan.
      lost: what lost the axes, in words.
    """

    stack: Axes = NONE
    lost: str = ""

    @property
    def is_lost(self) -> bool:
        return bool(self.lost)

    def lose(self, why: str) -> "Weight":
        return dataclasses.replace(self, dims=(), lost=why)


@dataclasses.dataclass(frozen=True)
class Output(Tracked):
    """The outputs of a product in an activation, while they can be told apart.

    Attributes:
      use: the product; `dims` has its parameter's output axes.
      taken: output axes of which one place was taken.
    """

    use: Use
    taken: Axes = NONE


@dataclasses.dataclass(frozen=True)
class Mixed(Tracked):
    """A parameter in an activation with whose elements it was combined.

    In a product with other data it would be a matrix: ``(w + change) @ x``.

    Attributes:
      is_factor: whether it was multiplied. Then a sum over an axis would be a product.
    """

    is_factor: bool


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that is no constant.

    Attributes:
      kind: ``'weight'`` if it is made of parameters alone, ``'data'`` if of the loss's
        other arguments, and ``'activation'`` if of both.
      tracked: the parameters of a weight; of an activation, what still matters.
      open: products that no other product has followed on the way to this value.
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


def unique(several: Iterable[Tracked]) -> tuple[Tracked, ...]:
    return tuple(dict.fromkeys(several))


def merged(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The parameters of a sum. One that is lost in a part may be whole in another."""
    several = dict.fromkeys(weights)
    whole = {x.parameter for x in several if not x.is_lost}
    return tuple(x for x in several if not (x.is_lost and x.parameter in whole))


def open_of(values: Iterable[Value | None]) -> frozenset[Use]:
    return frozenset().union(*(x.open for x in values if x))


def is_weight(value: Value | None) -> TypeGuard[Value]:
    return value is not None and value.kind == "weight"


def is_data(value: Value | None) -> TypeGuard[Value]:
    """Whether the loss's arguments are in it, with parameters or without."""
    return value is not None and value.kind in ("data", "activation")


def is_given(value: Value | None) -> bool:
    """Whether no parameter is in it: a constant, or the loss's other arguments."""
    return value is None or value.kind == "data"
