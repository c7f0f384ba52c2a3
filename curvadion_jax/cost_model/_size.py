"""How many bytes a model's synchronisation has to combine.

This part knows shapes, and nothing about links, time or the number of replicas. A
*payload* is the size of what goes into an all-reduce, in bytes, before the all-reduce's
own factor 2(N-1)/N: see `sync_bytes`.
"""

import math
import numbers
from typing import Any, NamedTuple

import jax

from curvadion_jax import _matrices, _partition
from curvadion_jax.cost_model._checks import check_count, check_type

FLOAT32_BYTES = 4
"""Bytes of one element: 100% are float32 gradients, and means are float32."""


class ModelSize(NamedTuple):
    """The size of a model, as `model_size` finds it.

    Attributes:
      parameters: Number of elements of all parameters.
      matrices: Those of them that are stacks of matrices: how many, their rows, and
        their columns.

    Examples:
      >>> from curvadion_jax.cost_model import ModelSize
      >>> ModelSize(parameters=42, matrices=((2, 4, 4),)).matrix_elements
      32
    """

    parameters: int
    matrices: tuple[tuple[int, int, int], ...] = ()

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices together."""
        return sum(math.prod(stack) for stack in self.matrices)


def model_size(
    params: Any, *, dimension_numbers: _partition.DimensionNumbersOrFn = None
) -> ModelSize:
    """Size of a model from its parameters, or from their plain number.

    Only shapes are read, so abstract parameters will do.

    Args:
      params: A pytree whose leaves have a `shape` (arrays, `jax.ShapeDtypeStruct`), or
        an int: the number of parameters, of which none counts as a matrix.
      dimension_numbers: Which parameters are matrices, as for `curvadion_jax.dion`.

    Returns:
      The size.

    Raises:
      ValueError: If a number of parameters is negative.
      TypeError: If a leaf has no shape.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from curvadion_jax.cost_model import model_size
      >>> params = {
      ...     "kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32),
      ...     "bias": jax.ShapeDtypeStruct((4,), jnp.float32),
      ... }
      >>> model_size(params)
      ModelSize(parameters=36, matrices=((1, 8, 4),))
      >>> model_size(162_201_600).parameters
      162201600
    """
    # A NumPy integer has a shape, (), and would count as a tree of one element.
    if isinstance(params, numbers.Integral):
        return ModelSize(check_count("the number of parameters", int(params), 0))
    parameters = sum(_elements(leaf) for leaf in jax.tree.leaves(params))
    views = _partition.matrix_views(params, dimension_numbers).values()
    found = [(math.prod(x.batch), x.rows, x.cols) for x in views if x is not None]
    return ModelSize(parameters, tuple(found))


def _elements(leaf: Any) -> int:
    shape = getattr(leaf, "shape", None)
    if shape is None:
        raise TypeError(
            f"a leaf of the parameters is {leaf!r}, which has no shape; give arrays or "
            "jax.ShapeDtypeStruct, or the number of parameters as an int."
        )
    return math.prod(shape)


def _check_size(size: ModelSize) -> None:
    what = "curvadion_jax.cost_model.model_size makes one"
    check_type("size", size, ModelSize, what)


def gradient_payload(size: ModelSize) -> int:
    """Payload of a sync that averages the float32 gradients of all parameters.

    Args:
      size: The model.

    Returns:
      Bytes to be combined, which on every step are what 100% means.

    Raises:
      TypeError: If `size` is not what `model_size` returns.

    Examples:
      >>> from curvadion_jax.cost_model import gradient_payload, model_size
      >>> gradient_payload(model_size(162_201_600))
      648806400
    """
    _check_size(size)
    return FLOAT32_BYTES * size.parameters


def factor_payload(size: ModelSize, rank: int | float) -> int:
    """Payload of Dion's compressed sync: factors P and R, other gradients whole.

    A matrix of m x n sends (m + n) r elements. One for which that is not less than
    m n is sent whole, as its gradient.

    Args:
      size: The model.
      rank: An int is a rank, a float in (0, 1] a fraction of the smaller side.

    Returns:
      Bytes to be combined.

    Raises:
      ValueError: If `rank` is out of range.
      TypeError: If `rank` is not a number, or `size` not what `model_size` returns.

    Examples:
      >>> from curvadion_jax.cost_model import ModelSize, factor_payload
      >>> size = ModelSize(5_007, matrices=((1, 100, 50),))
      >>> factor_payload(size, rank=2)  # 4 * ((100 + 50) * 2 + 7)
      1228
    """
    _check_size(size)
    _matrices.check_rank(rank)
    elements = size.parameters - size.matrix_elements
    for batch, rows, cols in size.matrices:
        r = _matrices.resolve_rank(min(rows, cols), rank)
        elements += batch * min((rows + cols) * r, rows * cols)
    return FLOAT32_BYTES * elements


def reconcile_payload(size: ModelSize, average_momentum: bool = True) -> int:
    """Payload of a sync that brings parameters (and momentum) together, uncompressed.

    That of a compressed one is its `Compressor.payload`.

    Args:
      size: The model.
      average_momentum: Whether the momentum of the matrices is averaged as well.

    Returns:
      Bytes to be combined.

    Raises:
      TypeError: If `size` is not what `model_size` returns.

    Examples:
      >>> from curvadion_jax.cost_model import ModelSize, reconcile_payload
      >>> size = ModelSize(5_007, matrices=((1, 100, 50),))
      >>> reconcile_payload(size), reconcile_payload(size, average_momentum=False)
      (40028, 20028)
    """
    _check_size(size)
    momentum = size.matrix_elements if average_momentum else 0
    return FLOAT32_BYTES * (size.parameters + momentum)
