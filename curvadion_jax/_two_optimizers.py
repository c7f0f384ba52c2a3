"""Divides the parameters between an optimizer of matrices and another for the rest.

Which are matrices, `dimension_numbers.py` finds out, or the user says.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from curvadion_jax import _matrix_view, _trees
from curvadion_jax import dimension_numbers as rules

DimensionNumbers = rules.DimensionNumbers
DimensionNumbersOrFn = Any | Callable[[optax.Params], Any] | None
"""A tree (or prefix) of DimensionNumbers and None, a function of the parameters that
returns one; None or "default" for `dimension_numbers.default`."""

DEFAULT = "default"  # of optimizers; None may be an answer, see `check_injected`


def is_default(dimension_numbers: DimensionNumbersOrFn) -> bool:
    return any(dimension_numbers is x for x in (None, DEFAULT, rules.default))


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
    if is_default(dimension_numbers):
        found = [each.numbers for each in rules.explain(params)]
        dimension_numbers = jax.tree.unflatten(jax.tree.structure(params), found)
    # An Equinox module, the tree of the parameters itself, can be called too.
    if callable(dimension_numbers) and type(dimension_numbers) is not type(params):
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
    leaves = _trees.leaves_with_path(params)
    for (name, leaf), numbers in zip(leaves, spread, strict=True):
        if name in views:
            raise ValueError(
                f"Two parameters have the path {name!r}. Rename one, without slashes."
            )
        try:
            views[name] = numbers and _matrix_view.make_view(
                leaf.shape, numbers.reduction_axis, numbers.output_axis
            )
        except ValueError as error:
            message = f"Dimension numbers of parameter {name!r}: {error}"
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
                f"Parameter {name!r} is not a matrix. Use curvadion_jax.dion or "
                "local_muon, which have another optimizer for it."
            )
        views[name] = view
    return views


def describe_partition(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> str:
    """Makes a printable table of every parameter: its optimizer, fans and the reason.

    `matrix` goes to Dion or Muon, `other` to AdamW or `other_optimizer`. The column
    *why* has the default rule's evidence, or `given` where the dimension numbers differ
    from the rule's.

    Args:
      params: any tree of arrays or abstract values.
      dimension_numbers: as for :func:`dion`.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((4, 8))}
      >>> print(describe_partition(params))
      parameter  shape   optimizer  matrices  fan_in  fan_out  why
      embed      (9, 4)  other                                 an embedding, by its name
      mlp        (4, 8)  matrix     1         4       8        two axes
    """
    views = matrix_views(params, dimension_numbers)
    rule = matrix_views(params)
    head = "parameter", "shape", "optimizer", "matrices", "fan_in", "fan_out", "why"
    rows: list[Sequence[str]] = [head]
    for name, shape, _, why, unknown in rules.explain(params):
        kind, sizes = "other", ("", "", "")
        if (view := views[name]) is not None:
            kind, sizes = "matrix", (math.prod(view.batch), view.fan_in, view.fan_out)
        if view != rule[name] or (unknown and not is_default(dimension_numbers)):
            why = "given"
        rows.append([name, str(shape), kind, *map(str, sizes), why])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


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
                "No parameter is a matrix, so Dion or Muon trains nothing. Look at "
                "curvadion_jax.describe_partition(params), and pass dimension_numbers."
            )

        def numbers(path, _):
            if (view := views[path]) is None:
                return None
            return DimensionNumbers(view.fan_in_axes, view.fan_out_axes)

        label = lambda path, _: "other" if views[path] is None else "matrix"
        return optax.partition(
            {
                "matrix": matrices(functools.partial(_trees.map_with_path, numbers)),
                "other": other,
            },
            functools.partial(_trees.map_with_path, label),
        )

    warned: set[tuple] = set()

    def init(params):
        _trees.check_trainable(params)
        if is_default(dimension_numbers):
            _warn_once(params, warned)
        return make(params).init(params)

    def update(updates, state, params=None, **extra_args):
        _trees.check_gradients(updates, params)
        return make(params).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _warn_once(params: Any, warned: set[tuple]) -> None:
    """Warns of a tree not yet warned of: a restart in an update inits again."""
    findings = rules.explain(params)
    tree = tuple((found.path, found.shape) for found in findings)
    if tree not in warned:
        rules.warn(findings)
        warned.add(tree)
