"""How many bytes a model's synchronisation has to combine.

This part knows shapes and element sizes, and nothing about links, time or the number
of replicas. A *payload* is the size of what goes into an all-reduce, in bytes, before
the all-reduce's own factor 2(N-1)/N: see `all_reduce_bytes`.
"""

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from curvadion_jax import _matrices, _partition
from curvadion_jax.cost_model._checks import check_count, check_type

FLAG_BYTES = 4
"""Payload of the flag: one int32, in bytes."""

WEIGHT_BYTES = 4
"""The weight of a replica, which each gathers from all at a sync, in bytes."""

FLOAT32_BYTES = 4
"""Bytes of one float32 element."""


@dataclass(frozen=True)
class MatrixShape:
    """The view of one parameter as a stack of matrices.

    Args:
      batch: Number of matrices in the stack (1 for a single matrix).
      rows: Rows of each matrix.
      cols: Columns of each matrix.

    Raises:
      ValueError: If a dimension is below 1.

    Examples:
      >>> from curvadion_jax.cost_model import MatrixShape
      >>> stack = MatrixShape(batch=12, rows=3072, cols=768)
      >>> stack.elements
      28311552
      >>> stack.factor_elements(rank=1 / 8)  # 12 * (3072 + 768) * 96
      4423680
    """

    batch: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name in ("batch", "rows", "cols"):
            check_count(f"MatrixShape.{name}", getattr(self, name), 1)

    @property
    def elements(self) -> int:
        """Number of elements in the whole stack."""
        return self.batch * self.rows * self.cols

    def resolve_rank(self, rank: int | float) -> int:
        """Rank of the factors for this shape.

        Args:
          rank: An int is a rank, clipped to the smaller side; a float in (0, 1] is a
            fraction of the smaller side, rounded up.

        Returns:
          The rank, between 1 and the smaller side.

        Raises:
          TypeError: If the rank is neither an int nor a float.
          ValueError: If an int is below 1 or a float lies outside (0, 1].
        """
        _matrices.check_rank(rank)
        return _matrices.resolve_rank(min(self.rows, self.cols), rank)

    def factor_elements(self, rank: int | float) -> int:
        """Elements of the two factors, or of the matrices where that is not more.

        Args:
          rank: As for `resolve_rank`.

        Returns:
          batch * min((rows + cols) r, rows cols).

        Raises:
          ValueError: If `rank` is out of range.
        """
        r = self.resolve_rank(rank)
        return self.batch * min((self.rows + self.cols) * r, self.rows * self.cols)


@dataclass(frozen=True)
class ModelSize:
    """The size of a model: its matrices, and the number of its other elements.

    Args:
      matrices: Parameters that the optimizer treats as (stacks of) matrices.
      other_elements: Elements of all other parameters (embeddings, heads, norms).

    Raises:
      ValueError: If `other_elements` is negative.

    Examples:
      >>> from curvadion_jax.cost_model import MatrixShape, ModelSize
      >>> size = ModelSize((MatrixShape(1, 8, 4),), other_elements=10)
      >>> size.parameters
      42
    """

    matrices: tuple[MatrixShape, ...] = ()
    other_elements: int = 0

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            what = "MatrixShape(batch=1, rows=768, cols=768)"
            check_type("a matrix of ModelSize", matrix, MatrixShape, what)
        check_count("ModelSize.other_elements", self.other_elements, 0)

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices together."""
        return sum(matrix.elements for matrix in self.matrices)

    @property
    def parameters(self) -> int:
        """Number of parameters (elements) of the model."""
        return self.matrix_elements + self.other_elements


def _matrix_shapes(
    params: Any, dimension_numbers: _partition.DimensionNumbersOrFn
) -> list[MatrixShape]:
    views = _partition.matrix_views(params, dimension_numbers)
    return [
        MatrixShape(math.prod(view.batch), view.rows, view.cols)
        for view in views.values()
        if view is not None
    ]


def model_size(
    params: Any,
    matrices: Iterable[MatrixShape] | None = None,
    *,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
) -> ModelSize:
    """Size of a model from its parameters, or from their plain number.

    Only shapes are read, so abstract parameters will do.

    Args:
      params: A pytree whose leaves have a `shape` (arrays, `jax.ShapeDtypeStruct`), or
        an int: the number of parameters.
      matrices: Which of the parameters are matrices, and as what they are viewed. All
        other elements count as `other_elements`. None takes what
        `curvadion_jax.dion` would take from a pytree, and nothing from a number.
      dimension_numbers: As for `curvadion_jax.dion`, where `matrices` is None.

    Returns:
      The size, with `parameters` equal to the number of elements of `params`.

    Raises:
      ValueError: If the matrices have more elements than `params`.
      TypeError: If a leaf has no shape.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from curvadion_jax.cost_model import model_size
      >>> params = {
      ...     "kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32),
      ...     "bias": jax.ShapeDtypeStruct((4,), jnp.float32),
      ... }
      >>> model_size(params)
      ModelSize(matrices=(MatrixShape(batch=1, rows=8, cols=4),), other_elements=4)
      >>> model_size(162_201_600).parameters
      162201600
    """
    # A NumPy integer has a shape, (), and would count as a tree of one element.
    if isinstance(params, numbers.Integral):
        total = check_count("the number of parameters", int(params), 0)
        matrices = () if matrices is None else tuple(matrices)
    else:
        total = sum(_elements(leaf) for leaf in jax.tree.leaves(params))
        if matrices is None:
            matrices = _matrix_shapes(params, dimension_numbers)
        matrices = tuple(matrices)
    other = total - ModelSize(matrices).matrix_elements
    if other < 0:
        raise ValueError(
            f"the matrices have {total - other} elements but the parameters only "
            f"{total}; list every matrix once, with batch * rows * cols equal to the "
            "elements of its parameter."
        )
    return ModelSize(matrices, other)


def _check_size(size: ModelSize) -> None:
    what = "curvadion_jax.cost_model.model_size makes one"
    check_type("size", size, ModelSize, what)


def _elements(leaf: Any) -> int:
    shape = getattr(leaf, "shape", None)
    if shape is None:
        raise TypeError(
            f"a leaf of the parameters is {leaf!r}, which has no shape; give arrays or "
            "jax.ShapeDtypeStruct, or the number of parameters as an int."
        )
    return math.prod(shape)


def gradient_payload(size: ModelSize, itemsize: int = FLOAT32_BYTES) -> int:
    """Payload of a sync that averages the gradients of all parameters.

    Args:
      size: The model.
      itemsize: Bytes of one element; 4 (float32) is what 100% means.

    Returns:
      Bytes to be combined.

    Raises:
      ValueError: If `itemsize` is below 1.

    Examples:
      >>> from curvadion_jax.cost_model import ModelSize, gradient_payload
      >>> gradient_payload(ModelSize(other_elements=162_201_600))
      648806400
    """
    _check_size(size)
    return check_count("itemsize", itemsize, 1) * size.parameters


def factor_payload(
    size: ModelSize, rank: int | float, itemsize: int = FLOAT32_BYTES
) -> int:
    """Payload of Dion's compressed sync: factors P and R, other gradients whole.

    A matrix of m x n sends (m + n) r elements. One for which that is not less than
    m n is sent whole, as its gradient.

    Args:
      size: The model.
      rank: An int is a rank, a float in (0, 1] a fraction of the smaller side.
      itemsize: Bytes of one element.

    Returns:
      Bytes to be combined.

    Raises:
      ValueError: If `rank` or `itemsize` is out of range.

    Examples:
      >>> from curvadion_jax.cost_model import MatrixShape, ModelSize, factor_payload
      >>> size = ModelSize((MatrixShape(1, 100, 50),), other_elements=7)
      >>> factor_payload(size, rank=2)  # 4 * ((100 + 50) * 2 + 7)
      1228
    """
    _check_size(size)
    _matrices.check_rank(rank)
    elements = sum(matrix.factor_elements(rank) for matrix in size.matrices)
    return check_count("itemsize", itemsize, 1) * (elements + size.other_elements)


def reconcile_payload(
    size: ModelSize, average_momentum: bool = True, itemsize: int = FLOAT32_BYTES
) -> int:
    """Payload of a sync that brings parameters (and momentum) together.

    Args:
      size: The model.
      average_momentum: Whether the momentum of the matrices is averaged as well.
      itemsize: Bytes of one element.

    Returns:
      Bytes to be combined.

    Raises:
      ValueError: If `itemsize` is below 1.

    Examples:
      >>> from curvadion_jax.cost_model import MatrixShape, ModelSize
      >>> from curvadion_jax.cost_model import reconcile_payload
      >>> size = ModelSize((MatrixShape(1, 100, 50),), other_elements=7)
      >>> reconcile_payload(size), reconcile_payload(size, average_momentum=False)
      (40028, 20028)
    """
    _check_size(size)
    momentum = size.matrix_elements if average_momentum else 0
    return check_count("itemsize", itemsize, 1) * (size.parameters + momentum)
