"""Which parameters are matrices for Dion, and which go to the other optimizer.

A rule gives every parameter dimension numbers in the manner of
`optax.contrib.MuonDimensionNumbers` (axes not named are batch axes) or None for the
other optimizer. The default rule reads shapes and paths: an embedding table and an
output head have two axes like any matrix, train without an error under Dion, and
train badly.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from curvadion_jax import _matrices, _paths, _trees

DimensionNumbers = optax.contrib.MuonDimensionNumbers
DimensionNumbersOrFn = Any | Callable[[optax.Params], Any] | None
"""A tree (or prefix) of DimensionNumbers and None, a function of the parameters that
returns one, or None for `default_dimension_numbers`."""

_EMBEDDING = re.compile(r".*embed.*|(.*_)?emb|wte|wpe|vocab.*|pos(_.*)?|.*_token")
_HEAD = re.compile(r"(.*_|lm|output)?(heads?|classifier|readout)|.*logit.*|unembed.*")
_VECTOR = re.compile(r".*(bias|scale|norm|gamma|beta).*")
_CONVOLUTION = re.compile(r".*conv.*")
_QUERY = re.compile(r"(q|query)(_?proj(ection)?)?")
_ATTENTION_IN = re.compile(r"(q|k|v|query|key|value)(_?proj(ection)?)?")
_ATTENTION_OUT = re.compile(r"(o|out)(_?proj(ection)?)?")

Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
"""Names along the path of a parameter -> its shape."""


def _is_stacked(names: tuple[str, ...], shapes: Shapes) -> bool:
    """Whether a three-dimensional attention kernel is a scan-over-layers stack.

    [layers, D, H*Dh] and [D, H, Dh] look alike; the norm's scale nearest in the tree,
    [layers, D] or [D], tells them apart.
    """
    shape = shapes[names]
    scales = {o[:-1]: s for o, s in shapes.items() if o and o[-1].lower() == "scale"}
    for depth in range(len(names) - 1, -1, -1):
        near = [s for other, s in scales.items() if other[:depth] == names[:depth]]
        if near:
            return all(len(s) == 2 and s[0] == shape[0] for s in near)
    raise ValueError(
        f"the parameter {'/'.join(names)!r} of shape {shape} may be a stack of "
        "matrices [layers, fan_in, fan_out] or one attention kernel [D, heads, "
        "head_dim]: pass dimension_numbers to say which"
    )


def _attention_side(names: tuple[str, ...], shapes: Shapes) -> str | None:
    """'in' for a query, key or value projection, 'out' for what follows attention.

    Only beside a query projection: elsewhere `out` and `v` are names like others.
    """
    for depth in (len(names) - 1, len(names) - 2):
        if depth < 0:
            continue
        beside = {other[depth] for other in shapes if other[:depth] == names[:depth]}
        if any(_QUERY.fullmatch(name.lower()) for name in beside):
            for side, pattern in (("in", _ATTENTION_IN), ("out", _ATTENTION_OUT)):
                if pattern.fullmatch(names[depth].lower()):
                    return side
    return None


def _default_numbers(names: tuple[str, ...], shapes: Shapes) -> DimensionNumbers | None:
    shape, lower = shapes[names], tuple(name.lower() for name in names)
    ndim = len(shape)
    if ndim < 2 or 0 in shape or (lower and _VECTOR.fullmatch(lower[-1])):
        return None
    for other in (_EMBEDDING, _HEAD, _CONVOLUTION):
        if any(other.fullmatch(name) for name in lower):
            return None
    side = _attention_side(names, shapes) if ndim in (3, 4) else None
    if side is None or (ndim == 3 and _is_stacked(names, shapes)):
        return DimensionNumbers(-2, -1)
    if side == "in":
        return DimensionNumbers(-3, (-2, -1))
    return DimensionNumbers((-3, -2), -1)


def default_dimension_numbers(params: optax.Params) -> Any:
    """The default rule: which parameters Dion takes, and how it sees them.

    * Fewer than two axes, no elements, or a last name with `bias`, `scale`, `norm`,
      `gamma` or `beta` in it: the other optimizer.
    * A path with an embedding (`embed`, `emb`, `wte`, `wpe`, `vocab`, `pos`,
      `cls_token`), an output head
      (`head`, `lm_head`, `logits`, `logitdense`, `classifier`, `readout`, `unembed`) or
      a convolution in it: the other optimizer. (`output` alone is no head: BERT's MLPs
      have that name.)
    * Attention projections with a head axis, [D, H, Dh] for `query`, `key` and
      `value` and [H, Dh, D] for `out`, beside a `query`: the two head axes count as
      one side.
    * All else: the last two axes are (fan_in, fan_out), axes in front are a stack
      (`nn.scan` over layers, experts). A model scanned over another axis than the
      first needs `dimension_numbers`.

    Args:
      params: any tree of arrays or abstract values, nnx state included.

    Returns:
      A tree of the same structure, with dimension numbers or None.

    Raises:
      ValueError: for a three-dimensional attention kernel that may be either a stack
        of layers or split into heads, where no norm's scale nearby tells.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((3, 4, 8))}
      >>> default_dimension_numbers(params)["mlp"]
      MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
      >>> default_dimension_numbers(params)["embed"] is None
      True
    """
    leaves = _paths.leaves_with_names(params)
    shapes = {names: leaf.shape for names, leaf in leaves}
    numbers = [_default_numbers(names, shapes) for names, _ in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), numbers)


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, DimensionNumbers)


def matrix_views(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> dict[str, _matrices.MatrixView | None]:
    """Path -> how Dion sees that parameter, None for the other optimizer's.

    Raises:
      TypeError: if something in the tree of dimension numbers is neither those nor
        None, or a parameter is not an array of real floating-point numbers.
      ValueError: if dimension numbers do not fit a shape or the tree of parameters.
    """
    _trees.check_arrays(params)
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
        if params is None:
            raise ValueError(
                "this optimizer needs the parameters, got params=None: call "
                "update(gradients, state, params)"
            )
        _trees.check_state_type(state, optax.transforms.PartitionState)
        _trees.check_gradients(updates, params)
        _trees.check_state(state, jax.eval_shape(init, params))
        return make(updates).update(updates, state, params, **extra_args)

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
    rank: int | float = 0.25,
) -> str:
    """A table of what Dion will do with every parameter, to be printed and checked.

    Args:
      params: any tree of arrays or abstract values.
      dimension_numbers: as for :func:`dion`; None is the default rule.
      rank: as for :func:`dion`.

    Returns:
      The table, one parameter a line under a heading, without a newline at its end.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((3, 4, 8))}
      >>> print(describe_partition(params))
      parameter  shape      optimizer  matrices  fan_in  fan_out  rank
      embed      (9, 4)     other
      mlp        (3, 4, 8)  dion       3         4       8        1
    """
    _matrices.check_rank(rank)
    views = matrix_views(params, dimension_numbers)
    shapes = {path: leaf.shape for path, leaf in _paths.leaves_with_path(params)}
    head = "parameter shape optimizer matrices fan_in fan_out rank"
    rows: list[tuple[str, ...]] = [tuple(head.split())]
    for name, view in views.items():
        row = (name, str(shapes[name]))
        if view is None:
            rows.append((*row, "other", "", "", "", ""))
        else:
            number = math.prod(view.batch)
            r = _matrices.resolve_rank(view.cols, rank)
            sizes = (number, view.fan_in, view.fan_out, r)
            rows.append((*row, "dion", *map(str, sizes)))
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
