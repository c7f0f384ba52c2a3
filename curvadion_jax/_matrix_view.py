"""Parameters as stacks of matrices with at least as many rows as columns.

A Flax kernel is (fan_in, fan_out). Dion wants the orthonormal factor P on the larger
of the two sides (on fan_out when they are equal) and the right factor Q on the other.
`MatrixView` holds which axes are which, and moves arrays there and back.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_tuple

Named = dict[str, jax.Array]
"""Arrays by the paths of their parameters."""
MadeOf = Sequence[tuple[int, ...]]
"""For each axis of a factor the axes of its parameter that it merges."""


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A parameter of a given shape as a stack ``[*batch, rows, cols]``, rows >= cols.

    Attributes:
      shape: the parameter's shape.
      batch_axes: axes over which the matrices are stacked, ascending.
      fan_in_axes: axes that a matrix-vector product sums over.
      fan_out_axes: axes that it produces.
    """

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    fan_in_axes: tuple[int, ...]
    fan_out_axes: tuple[int, ...]

    @property
    def fan_in(self) -> int:
        return math.prod(self.shape[axis] for axis in self.fan_in_axes)

    @property
    def fan_out(self) -> int:
        return math.prod(self.shape[axis] for axis in self.fan_out_axes)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.batch_axes)

    @property
    def rows(self) -> int:
        return max(self.fan_in, self.fan_out)

    @property
    def cols(self) -> int:
        return min(self.fan_in, self.fan_out)

    @property
    def row_axes(self) -> tuple[int, ...]:
        return self.fan_in_axes if self.fan_out < self.fan_in else self.fan_out_axes

    @property
    def col_axes(self) -> tuple[int, ...]:
        return self.fan_out_axes if self.fan_out < self.fan_in else self.fan_in_axes

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.fan_in_axes, self.fan_out_axes

    @property
    def p_axes(self) -> list[tuple[int, ...]]:
        """The axes of the parameter that each axis of P merges."""
        return [*[(axis,) for axis in self.batch_axes], self.row_axes, ()]

    @property
    def q_axes(self) -> list[tuple[int, ...]]:
        """The axes of the parameter that each axis of Q, or R, merges."""
        return [*[(axis,) for axis in self.batch_axes], self.col_axes, ()]

    def stacked(self, number: int) -> "MatrixView":
        """The view of so many parameters of this shape, stacked on a first axis."""
        behind = lambda axes: tuple(axis + 1 for axis in axes)
        return MatrixView(
            (number, *self.shape),
            (0, *behind(self.batch_axes)),
            behind(self.fan_in_axes),
            behind(self.fan_out_axes),
        )

    @property
    def _rows_first(self) -> bool:
        return self.row_axes < self.col_axes

    @property
    def _order(self) -> tuple[int, ...]:
        """Batch axes, then the axes of both sides in the order of the parameter."""
        sides = (self.row_axes, self.col_axes)
        return self.batch_axes + sum(sides if self._rows_first else sides[::-1], ())

    def to_matrix(self, x: jax.Array) -> jax.Array:
        """``[shape] -> [*batch, rows, cols]``."""
        sides = (self.rows, self.cols)
        sides = sides if self._rows_first else sides[::-1]
        stack = jnp.transpose(x, self._order).reshape(*self.batch, *sides)
        # The transposition comes last, where a matrix product absorbs it.
        return stack if self._rows_first else stack.mT

    def product(
        self,
        left: jax.Array,
        right: jax.Array,
        precision: jax.lax.PrecisionLike = lax.Precision.HIGHEST,
    ) -> jax.Array:
        """L R^T of ``[*batch, rows, r]`` and ``[*batch, cols, r]``: ``[shape]``.

        Computed in the parameter's order: transposing the product would cost as much.
        """
        first, second = (left, right) if self._rows_first else (right, left)
        outer = matmul(first, second.mT, precision)
        return _in_shape(outer, self.shape, self._order)

    def to_stack(self, x: jax.Array) -> jax.Array:
        """``[shape] -> [number, fan_in, fan_out]``, also of a device's part of it.

        Where axes are merged, rows or columns are not in the order of the parameter.
        """
        fan_in = math.prod(x.shape[axis] for axis in self.fan_in_axes)
        order = self.batch_axes + self.fan_in_axes + self.fan_out_axes
        batch = math.prod(x.shape[axis] for axis in self.batch_axes)
        return jnp.transpose(x, order).reshape(batch, fan_in, -1)

    def from_stack(self, stack: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_stack`, for an array of this shape."""
        order = self.batch_axes + self.fan_in_axes + self.fan_out_axes
        return _in_shape(stack, shape, order)


def _in_shape(x: jax.Array, shape: tuple[int, ...], order: tuple[int, ...]):
    """Undoes a transposition to this order of axes, and merges of axes after it."""
    x = x.reshape([shape[axis] for axis in order])
    return jnp.transpose(x, np.argsort(order).tolist())


def make_view(
    shape: tuple[int, ...],
    fan_in_axes: int | Sequence[int],
    fan_out_axes: int | Sequence[int],
) -> MatrixView:
    """View of a parameter whose other axes are batch axes.

    Axes may be negative. Raises ValueError if an axis does not exist or is named twice,
    or if the matrix has no elements.
    """
    fan_in = normalize_axis_tuple(fan_in_axes, len(shape), "reduction_axis")
    fan_out = normalize_axis_tuple(fan_out_axes, len(shape), "output_axis")
    if not fan_in or not fan_out or set(fan_in) & set(fan_out) or 0 in shape:
        raise ValueError(
            f"Shape {shape} with reduction axes {fan_in} and output axes {fan_out} is "
            "not a matrix. None sends a parameter to the other optimizer."
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in fan_in + fan_out)
    return MatrixView(tuple(shape), batch, fan_in, fan_out)


def resolve_rank(cols: int, rank: int | float) -> int:
    """Rank of a matrix: an int, clipped to the smaller side, or a fraction of it."""
    if isinstance(rank, int):
        return min(rank, cols)
    # 0.07 * 100 is 7.000000000000001 in floating point, and means 7.
    return max(1, math.ceil(rank * cols - 1e-9))


def matmul(
    a: jax.Array,
    b: jax.Array,
    precision: jax.lax.PrecisionLike = lax.Precision.HIGHEST,
) -> jax.Array:
    """Multiplies stacks of matrices, in full precision unless told otherwise."""
    # Products of bfloat16 passes, the default on TPU, leave noise in R where the
    # momentum has nothing, and noise in R becomes a step of full length.
    return jnp.matmul(a, b, precision=precision)


def check_rank(rank: int | float) -> None:
    """Rejects a rank that is not a positive int or a fraction in (0, 1]."""
    if not isinstance(rank, int | float):
        raise TypeError(
            f"rank must be a Python int or float, got {rank!r}. With "
            "optax.inject_hyperparams, pass static_args=('rank',)."
        )
    if not 0 < rank or (isinstance(rank, float) and rank > 1):
        raise ValueError(
            f"rank must be a positive int, or a fraction in (0, 1], got {rank}."
        )
