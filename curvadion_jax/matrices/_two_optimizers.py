"""Divides the parameters between an optimizer of matrices and another for the rest.

Which are matrices, the user says, by `dimension_numbers.from_loss` for example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _matrix_view, _trees
from curvadion_jax.dimension_numbers import _by_name, _partition, _record
from curvadion_jax.dimension_numbers._partition import (
    DimensionNumbers,
    Finding,
    Partition,
)

DimensionNumbersOrFn = Any | Callable[[optax.Params], Any] | None
"""A tree (or prefix) of DimensionNumbers and None, a function of the parameters that
returns one, such as a `Partition`; None or "default" for the short rule, `by_name`."""

DEFAULT = "default"  # of optimizers; None may be an answer, see `check_injected`


def is_default(dimension_numbers: DimensionNumbersOrFn) -> bool:
    is_named = isinstance(dimension_numbers, str) and dimension_numbers == DEFAULT
    return dimension_numbers is None or is_named


def check_injected(dimension_numbers: DimensionNumbersOrFn, number: Any) -> None:
    """Rejects what `optax.inject_hyperparams` makes of a function of the parameters.

    It takes a function for a schedule, and a rule that is given a step number finds one
    leaf or no matrix. `number` is an argument that it makes an array of.
    """
    if isinstance(number, jax.Array) and _is_numbers(dimension_numbers):
        raise TypeError(
            f"dimension_numbers is {dimension_numbers} in an optimizer of injected "
            "hyperparameters, and may be what a function returned that was taken for a "
            "schedule. Pass static_args=('dimension_numbers',) to "
            "optax.inject_hyperparams, or leave it out for the default."
        )


def matrix_views(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> dict[str, _matrix_view.MatrixView | None]:
    """The view of each parameter by its path; None for the other optimizer's."""
    _trees.check_trainable(params)
    if not jax.tree.leaves(params):  # such as what Optax puts in for the parameters
        return {}
    leaves = _trees.leaves_with_path(params)
    paths = [path for path, _ in leaves]
    if len(set(paths)) < len(paths):
        twice = max(paths, key=paths.count)
        raise ValueError(
            f"Two parameters have the path {twice!r}. Rename one, without slashes."
        )
    if is_default(dimension_numbers):
        dimension_numbers = _by_name.find(params)
    # An Equinox module, the tree of the parameters itself, can be called too.
    if callable(dimension_numbers) and type(dimension_numbers) is not type(params):
        dimension_numbers = dimension_numbers(params)
    if isinstance(dimension_numbers, Partition):  # such as `by_name` returns
        dimension_numbers = dimension_numbers(params)
    spread: list[Any] = []

    def add(numbers, subtree):
        if not _is_numbers(numbers):
            raise TypeError(
                "dimension_numbers must hold optax.contrib.MuonDimensionNumbers or "
                f"None, got {numbers!r:.200}."
            )
        spread.extend([numbers] * len(jax.tree.leaves(subtree)))

    jax.tree.map(add, dimension_numbers, params, is_leaf=_is_numbers)
    views: dict[str, _matrix_view.MatrixView | None] = {}
    for (path, leaf), numbers in zip(leaves, spread, strict=True):
        try:
            views[path] = numbers and _matrix_view.make_view(
                leaf.shape, numbers.reduction_axis, numbers.output_axis
            )
        except ValueError as error:
            message = f"Dimension numbers of parameter {path!r}: {error}"
            raise ValueError(message) from error
    return views


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, DimensionNumbers)


def matrices_only(
    tree: Any, dimension_numbers: DimensionNumbersOrFn
) -> dict[str, _matrix_view.MatrixView]:
    """`matrix_views` of a tree without parameters of the other optimizer."""
    views = {}
    for name, view in matrix_views(tree, dimension_numbers).items():
        if view is None:
            raise ValueError(
                f"Parameter {name!r} is not a matrix, or not known to be one. Use "
                "curvadion_jax.dion or local_muon, which have another optimizer for "
                "it, or pass dimension_numbers."
            )
        views[name] = view
    return views


def describe_partition(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> str:
    """Makes a printable table of every parameter: its kind, fans and the reason.

    A `matrix` goes to Dion or Muon, everything else to AdamW or `other_optimizer`. The
    column *why* has what was seen in the program or, without dimension numbers, what
    the short rule goes by.

    Args:
      params: any tree of arrays or abstract values.
      dimension_numbers: as for :func:`local_muon`.

    Returns:
      The table, one line per parameter.

    Raises:
      TypeError: if `dimension_numbers` holds something else than dimension numbers.
      ValueError: if they do not fit the parameters, or two of these have one path.

    Example:
      >>> ones = jax.numpy.ones
      >>> params = {"gate": ones((4, 4)), "up": {"kernel": ones((4, 8))}}
      >>> print(describe_partition(params))
      parameter  shape   kind    matrices  fan_in  fan_out  why
      gate       (4, 4)  asked                              name and shape do not tell
      up/kernel  (4, 8)  matrix  1         4       8        a kernel, by its name
    """
    if is_default(dimension_numbers):
        return str(_by_name.find(params))
    if isinstance(dimension_numbers, Partition):
        return _partition.table(dimension_numbers.of(params))
    found = []
    views = matrix_views(params, dimension_numbers)
    for path, leaf in _trees.leaves_with_path(params):
        numbers = (view := views[path]) and DimensionNumbers(*view.sides)
        kind = "other" if view is None else "matrix"
        found.append(Finding(path, tuple(leaf.shape), kind, numbers, "given"))
    return _partition.table(found)


class TwoOptimizersState(NamedTuple):
    """The state of `optimizer`.

    Attributes:
      partition: which parameters were matrices when the state was made; no array.
      inner_states: of `optax.partition`, by ``'matrix'`` and ``'other'``.
    """

    partition: Any
    inner_states: Any


def optimizer(
    matrices: Callable[[Any], optax.GradientTransformation],
    other: optax.GradientTransformation,
    dimension_numbers: DimensionNumbersOrFn,
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """Combines an optimizer for the matrices with another for the rest.

    The rule for `dimension_numbers` sees the whole tree of parameters, but inside
    `optax.partition` an optimizer sees its own leaves only. So `matrices` makes its
    optimizer from a function from a masked tree to the dimension numbers of its leaves.
    """
    check_injected(dimension_numbers, learning_rate)

    def make(params):
        views = matrix_views(params, dimension_numbers)
        axes = max((leaf.ndim for leaf in jax.tree.leaves(params)), default=0)
        if axes > 1 and not any(views.values()):
            raise ValueError(
                "No parameter is known to be a matrix, so Dion or Muon trains nothing. "
                f"Look at curvadion_jax.describe_partition(params), and pass "
                f"{_by_name.LINE}. If the parameters have rows, give the optimizer the "
                "mesh."
            )

        def numbers_at(path, _):
            return (view := views[path]) and DimensionNumbers(*view.sides)

        label = lambda path, _: "other" if views[path] is None else "matrix"
        tx = optax.partition(
            {
                "matrix": matrices(functools.partial(_trees.map_with_path, numbers_at)),
                "other": other,
            },
            functools.partial(_trees.map_with_path, label),
        )
        return tx, _record.record(params, views)

    warned: set[tuple] = set()

    def init(params) -> Any:
        _trees.check_trainable(params)
        # Of one tree once: a restart in an update inits again.
        tree = tuple((path, x.shape) for path, x in _trees.leaves_with_path(params))
        if is_default(dimension_numbers) and tree not in warned:
            warned.add(tree)
            _by_name.by_name(params)
        tx, partition = make(params)
        inner: Any = tx.init(params)
        return TwoOptimizersState(partition, inner.inner_states)

    def update(updates, state, params=None, **extra_args) -> Any:
        _trees.check_gradients(updates, params)
        tx, partition = make(params)
        _record.check(state.partition, partition)
        inner: Any = optax.PartitionState(state.inner_states)
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, TwoOptimizersState(state.partition, inner.inner_states)

    return optax.GradientTransformationExtraArgs(init, update)
