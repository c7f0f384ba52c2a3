"""What the equations of a program do with its parameters."""

import dataclasses
from typing import NamedTuple

from curvadion_jax.dimension_numbers._axes import Axes


class Use(NamedTuple):
    """What one equation does with one parameter.

    Attributes:
      equation: the equation's `id`, so that a loop that is read twice adds no use.
      parameter: the parameter's number, in the order of the leaves.
      kind: ``'product'`` or ``'convolution'`` with data; ``'lookup'`` of rows at places
        that data give, or ``'constant lookup'``; ``'elementwise'``, or ``'constant'``
        if a product with a constant came first; ``'number'`` if a single number made of
        the parameter is used, such as its norm; ``'backward'`` for anything in the
        backward pass of a gradient; or ``'unknown'``.
      inputs, outputs, stack: the axes of the parameter that a product sums over, that
        it keeps, and that it pairs with an axis of the other operand.
      vectors: how many vectors a product multiplies the matrix with.
      is_part: whether it takes a part of the parameter.
      why: the use in words, for the user.
      where: the line of the program, such as ``'model.py:63'``.
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


@dataclasses.dataclass
class Facts:
    """All that the reader has found so far.

    Attributes:
      uses: a set of uses in the order of the program.
      followed: products whose result reaches another product.
      maybe_followed: products whose result reaches what may be a product.
      told: what later equations tell of an output axis of a product; the words are
        those of `Reader.tell`.
    """

    uses: dict[Use, None] = dataclasses.field(default_factory=dict)
    followed: set[Use] = dataclasses.field(default_factory=set)
    maybe_followed: set[Use] = dataclasses.field(default_factory=set)
    told: dict[tuple[Use, int], frozenset[str]] = dataclasses.field(
        default_factory=dict
    )

    def copy(self) -> "Facts":
        return Facts(
            dict(self.uses),
            set(self.followed),
            set(self.maybe_followed),
            dict(self.told),
        )
