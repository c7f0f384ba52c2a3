"""Which parameters are matrices for Dion, and which go to the other optimizer.

A rule gives every parameter dimension numbers in the manner of
`optax.contrib.MuonDimensionNumbers` (axes not named are batch axes) or None for the
other optimizer. `_default_rule` is the one that is taken where none is given.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from curvadion_jax import _matrices, _paths, _trees
from curvadion_jax._default_rule import DimensionNumbers, default_dimension_numbers

DimensionNumbersOrFn = Any | Callable[[optax.Params], Any] | None
"""A tree (or prefix) of DimensionNumbers and None, a function of the parameters that
returns one, or None for `default_dimension_numbers`."""


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, DimensionNumbers)


def matrix_views(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> dict[str, _matrices.MatrixView | None]:
    """Path -> how Dion sees that parameter, None for the other optimizer's.

    Raises:
      TypeError: if something in the tree of dimension numbers is neither those nor
        None, or a parameter has no real floating-point numbers.
      ValueError: if dimension numbers do not fit a shape or the tree of parameters.
    """
    _trees.check_trainable(params)
    if dimension_numbers is None:
        dimension_numbers = default_dimension_numbers
    if callable(dimension_numbers):
        dimension_numbers = dimension_numbers(params)
    views: dict[str, _matrices.MatrixView | None] = {}
    spread = _spread(dimension_numbers, params)
    for (name, leaf), numbers in zip(
        _paths.leaves_with_path(params), spread, strict=True
    ):
        if name in views:
            raise ValueError(
                f"two parameters have the path {name!r}: rename one, without "
                "slashes in its name"
            )
        views[name] = None if numbers is None else _view(name, leaf, numbers)
    return views


def matrices_only(
    tree: Any, dimension_numbers: DimensionNumbersOrFn
) -> dict[str, _matrices.MatrixView]:
    """Path -> how it is seen as matrices, in the order of the leaves."""
    views = {}
    found = matrix_views(tree, dimension_numbers)
    for name, leaf in _paths.leaves_with_path(tree):
        view = found[name]
        if view is None:
            raise ValueError(
                f"scale_by_dion cannot take the parameter {name!r} of shape "
                f"{tuple(leaf.shape)}, which is not a matrix: use curvadion_jax.dion, "
                "which gives such parameters to another optimizer"
            )
        views[name] = view
    return views


def _spread(dimension_numbers: Any, params: optax.Params) -> list[Any]:
    """Dimension numbers of every leaf, from a tree or a prefix of the parameters'."""
    spread = []

    def add(numbers, subtree):
        if not _is_numbers(numbers):
            raise TypeError(
                "dimension_numbers must hold optax.contrib.MuonDimensionNumbers or "
                f"None, got {numbers!r}"
            )
        spread.extend([numbers] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(add, dimension_numbers, params, is_leaf=_is_numbers)
    except ValueError as error:
        raise ValueError(
            "dimension_numbers must be a tree (or a prefix) of the parameters' "
            f"structure, got a {type(dimension_numbers).__name__}; pass a function of "
            f"the parameters instead: {error}"
        ) from error
    return spread


def _view(name: str, leaf: jax.Array, numbers: DimensionNumbers):
    try:
        return _matrices.make_view(leaf.shape, *numbers)
    except ValueError as error:
        raise ValueError(
            f"dimension numbers of the parameter {name!r}: {error}"
        ) from error


def resolved(
    dimension_numbers: DimensionNumbersOrFn,
    build: Callable[[Callable[[Any], Any]], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """A partitioned optimizer whose rule sees the whole tree of parameters.

    Inside `optax.partition` each part sees its own leaves only, and a rule that looks
    at a parameter's neighbours would decide otherwise there than outside.

    Args:
      dimension_numbers: what the user gave.
      build: takes a function from any masked tree of the parameters to the dimension
        numbers of its leaves, as decided for the whole; returns the optimizer.
    """

    def make(tree):
        views = matrix_views(tree, dimension_numbers)

        def numbers(path, _):
            view = views[path]
            if view is None:
                return None
            return DimensionNumbers(view.fan_in_axes, view.fan_out_axes)

        tx = build(lambda masked: _paths.map_with_path(numbers, masked))
        return optax.with_extra_args_support(tx)

    def init(params):
        return make(params).init(params)

    def update(updates, state, params=None, **extra_args):
        _trees.check_state_type(state, optax.transforms.PartitionState)
        _trees.check_gradients(updates, params)
        try:
            return make(params).update(updates, state, params, **extra_args)
        except (TypeError, ValueError):  # of a state of other parameters, perhaps
            _trees.check_state(state, jax.eval_shape(init, params))
            raise

    return optax.GradientTransformationExtraArgs(init, update)


def labels(params: optax.Params, dimension_numbers: DimensionNumbersOrFn) -> Any:
    """A tree of 'dion' and 'other' for `optax.partition`."""
    views = matrix_views(params, dimension_numbers)
    return _paths.map_with_path(
        lambda path, _: "other" if views[path] is None else "dion", params
    )


def describe_partition(
    params: optax.Params,
    dimension_numbers: DimensionNumbersOrFn = None,
    rank: int | float | None = None,
) -> str:
    """A table of what becomes of every parameter, to be printed and checked.

    Matrices are orthonormalised (by Dion, or Muon, which has no rank); what is other
    goes to AdamW or `other_optimizer`.

    Args:
      params: any tree of arrays or abstract values.
      dimension_numbers: as for :func:`dion`; None is the default rule.
      rank: as for :func:`dion`, for a column of ranks; None is without.

    Returns:
      The table, one parameter a line under a heading, without a newline at its end.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((3, 4, 8))}
      >>> print(describe_partition(params, rank=0.25))
      parameter  shape      optimizer  matrices  fan_in  fan_out  rank
      embed      (9, 4)     other
      mlp        (3, 4, 8)  matrix     3         4       8        1
    """
    if rank is not None:
        _matrices.check_rank(rank)
    views = matrix_views(params, dimension_numbers)
    shapes = {path: leaf.shape for path, leaf in _paths.leaves_with_path(params)}
    head: list[str] = [*"parameter shape optimizer matrices fan_in fan_out".split()]
    rows = [head if rank is None else [*head, "rank"]]
    for name, view in views.items():
        kind, sizes = "other", []
        if view is not None:
            kind, sizes = "matrix", [math.prod(view.batch), view.fan_in, view.fan_out]
            if rank is not None:
                sizes.append(_matrices.resolve_rank(view.cols, rank))
        row = [name, str(shapes[name]), kind, *map(str, sizes)]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def optimizer(
    matrices: Callable[[Any], optax.GradientTransformation],
    other: optax.GradientTransformation,
    dimension_numbers: DimensionNumbersOrFn,
) -> optax.GradientTransformationExtraArgs:
    """One optimizer for the matrices and another for the rest.

    Args:
      matrices: takes dimension numbers and returns the optimizer of the matrices.
      other: optimizer of the other parameters.
      dimension_numbers: what the user gave.
    """

    def build(numbers):
        return optax.partition(
            {"dion": matrices(numbers), "other": other},
            lambda params: labels(params, numbers),
        )

    return resolved(dimension_numbers, build)
