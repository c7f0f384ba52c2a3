"""Finds which parameters are matrices, along which axes, and their optimizers.

A rule gives every parameter `optax.contrib.MuonDimensionNumbers`, or None for the other
optimizer: an embedding table and an output head have two axes like any matrix, but
train badly under Dion or Muon.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from curvadion_jax import _arguments, _matrices, _paths, _trees

DimensionNumbers = optax.contrib.MuonDimensionNumbers
DimensionNumbersOrFn = Any | Callable[[optax.Params], Any] | None
"""A tree (or prefix) of DimensionNumbers and None, a function of the parameters that
returns one, or None for `default_dimension_numbers`."""

EPSILON = 1e-7  # of AdamW and Muon; 1e-8, Optax's, is zero in float16

Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
"""Names along the path of a parameter -> its shape."""

# Of the last two names of a path, in lower case.
_TOKENS = r".*embed.*|(.*_)?emb|wte|vocab.*"
_POSITIONS = r"wpe|pos(_.*)?|.*_pos(ition)?_.*|.*position.*"
_HEAD = r"(?!multi|att)(.*_|lm|output)?(head|classifier|readout)|heads|.*logit.*"
_LAYER_NORM = r"(.*_)?ln(_?\w)?|(.*_)?(layer_?|rms_?)norm(_?\w)?"
_OTHER = rf"{_TOKENS}|{_POSITIONS}|.*_token|{_HEAD}|.*conv.*|{_LAYER_NORM}"
# A projection inside a norm must have another name.
_SCALE_OF_NORM = r"((.*_)?norm(_?\w)?|rms)/(w|weight)"
# Of the last name.
_VECTOR = r"(.*_)?(bias|scale|gamma|beta|norm(_.*)?)|bias_.*"
# Of one of the last two names, next to a query.
_QUERY = r"(q|query)(_?proj(ection)?)?|wq(_b)?"
_ATTENTION_IN = r"(q|k|v|query|key|value)(_?proj(ection)?)?|w(q|kv)_b"
_ATTENTION_OUT = r"(attn_|attention_)?(o|out)(_?proj(ection)?)?"
# Gemma's: [heads, D, head_dim], after an axis of keys and values, and back.
_EINSUM_IN = r"(q|kv|qkv)_einsum"
_EINSUM_OUT = r"attn_vec_einsum"

# By the side of attention with an axis of heads, and whether layers are on axis 1.
_STACKED = {
    (None, False): DimensionNumbers(-2, -1),  # [..., fan_in, fan_out]
    (None, True): DimensionNumbers(0, -1),  # [fan_in, layers, fan_out]
    ("in", False): DimensionNumbers(-3, (-2, -1)),  # [..., D, H, Dh]
    ("in", True): DimensionNumbers(0, (-2, -1)),  # [D, layers, H, Dh]
    ("out", False): DimensionNumbers((-3, -2), -1),  # [..., H, Dh, D]
    ("out", True): DimensionNumbers((0, -2), -1),  # [H, layers, Dh, D]
}


def _match(pattern: str, names: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name.lower()) for name in names)


def default_dimension_numbers(params: Any) -> Any:
    """Applies the default rule: which parameters are matrices, along which axes.

    It reads shapes and the last two names of a path, so the name of a module says
    nothing about what lies deeper inside it. :func:`describe_partition` shows the
    result, but `optax.partition` or `optax.masked` around an optimizer hides parameters
    that tell: give `dimension_numbers` there. To the other optimizer go

    * with fewer than two axes or no elements, or a last name such as `bias`, `scale`,
      `gamma`, `beta` or `norm`,
    * of an embedding (`embed`, `emb`, `wte`, `wpe`, `vocab`, `pos`, `cls_token`), an
      output head (`head`, `lm_head`, `logits`, `classifier`, `readout`, `unembed`), a
      layer norm or a convolution,
    * with a side as long as a token embedding's vocabulary, if no other parameter has
      one: an output head, whatever its name.

    All else are matrices. The last two axes are (fan_in, fan_out) and axes in front are
    a stack (`nn.scan` over layers, experts), except for

    * attention with a head axis: [D, H, Dh] for `query`, `key` and `value`, [H, Dh, D]
      for `out`, next to a `query`; and Gemma's `q_einsum`, `kv_einsum` [..., H, D, Dh].
      Both head axes count as one side,
    * layers on the second axis, as in MaxText, where norms' scales are [D, layers],
    * the `weight` of an Equinox module, which is (fan_out, fan_in).

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
    # A name may be a whole path: Haiku's `gpt/~/embed`, `wte.weight`, a flattened tree.
    parts = {n: tuple(re.findall(r"[^/.,'() ]+", "/".join(n))) for n, _ in leaves}
    shapes = {parts[names]: leaf.shape for names, leaf in leaves}
    heads = _only_heads(shapes)
    equinox = _equinox_weights(params)

    def numbers_of(names, shape):
        path = parts[names]
        numbers = None if path in heads else _default_numbers(path, shape, shapes)
        return None if numbers is None else equinox.get(names, numbers)

    return jax.tree.unflatten(
        jax.tree.structure(params), [numbers_of(names, x.shape) for names, x in leaves]
    )


def _default_numbers(
    names: tuple[str, ...], shape: tuple[int, ...], shapes: Shapes
) -> DimensionNumbers | None:
    last, ndim = names[-2:], len(shape)
    if ndim < 2 or 0 in shape or _match(_VECTOR, names[-1:]) or _match(_OTHER, last):
        return None
    if _match(_SCALE_OF_NORM, ["/".join(last)]):
        return None
    if ndim == 2:
        return DimensionNumbers(-2, -1)
    if _match(_EINSUM_IN, last):
        return DimensionNumbers(-2, (-3, -1))
    if _match(_EINSUM_OUT, last):
        return DimensionNumbers((-3, -2), -1)
    side = _attention_side(names, shapes) if ndim in (3, 4) else None
    layers_axis = _scan_axis(names, shape, shapes, side)
    if ndim == 3 and layers_axis is not None:
        side = None  # With an axis of layers there is none of heads.
    layers_second = layers_axis == 1 and (ndim == 3 or side is not None)
    return _STACKED[side, layers_second]


def _only_heads(shapes: Shapes) -> set[tuple[str, ...]]:
    """For each table, the only other parameter with a side as long as its vocabulary.

    If several parameters have one, the length may be another width.
    """
    tables = {
        names: shape
        for names, shape in shapes.items()
        if len(shape) == 2
        and _match(_TOKENS, names[-2:])
        and not _match(_POSITIONS, names[-2:])
    }
    heads = set()
    for vocabulary in {shape[0] for shape in tables.values()}:
        others = [
            names
            for names, shape in shapes.items()
            if vocabulary in shape and len(shape) > 1 and names not in tables
        ]
        if len(others) == 1 and len(shapes[others[0]]) == 2:
            heads.add(others[0])
    return heads


def _scan_axis(
    names: tuple[str, ...], shape: tuple[int, ...], shapes: Shapes, side: str | None
) -> int | None:
    """The axis of a scan over layers: 0, or 1 as in MaxText; None without a scan.

    [layers, D, H*Dh] and [D, H, Dh] look alike. The scales of the nearest norms tell
    them apart: [layers, D], [D, layers] or, without a scan, [D]. If there are as many
    layers as D, the axis that all kernels nearby have alike is that of the layers.

    Raises:
      ValueError: if no norm has a scale, and a kernel of a `side` of attention may have
        layers or heads.
    """
    for depth in range(len(names) - 1, -1, -1):
        near = {o: s for o, s in shapes.items() if o[:depth] == names[:depth]}
        scales = [s for o, s in near.items() if o and o[-1].lower() == "scale"]
        if not scales:
            continue
        if any(len(scale) != 2 for scale in scales):
            return None
        axes = [axis for axis in (0, 1) if {s[axis] for s in scales} == {shape[axis]}]
        if len(axes) < 2:
            return axes[0] if axes else None
        kernels = [s for s in near.values() if len(s) > 2]
        first, second = ({s[axis] for s in kernels} for axis in (0, 1))
        return 1 if len(first) > 1 and len(second) == 1 else 0
    if side and len(shape) == 3:  # no norm has a scale
        raise ValueError(
            f"Parameter {'/'.join(names)!r} of shape {shape} may be a stack of "
            "matrices [layers, fan_in, fan_out] or one attention kernel [D, heads, "
            "head_dim]. Pass dimension_numbers to say which."
        )
    return None


def _attention_side(names: tuple[str, ...], shapes: Shapes) -> str | None:
    """'in' for a query, key or value projection, 'out' for the output projection.

    Only next to a query projection: elsewhere `out` and `v` mean something else.
    """
    for depth in range(len(names) - 1, max(len(names) - 3, -1), -1):
        beside = [other[depth:] for other in shapes if other[:depth] == names[:depth]]
        if _match(_QUERY, (rest[0] for rest in beside if rest)):
            for side, pattern in (("in", _ATTENTION_IN), ("out", _ATTENTION_OUT)):
                if _match(pattern, [names[depth]]):
                    return side
    return None


def _equinox_weights(params: Any) -> dict[tuple[str, ...], DimensionNumbers | None]:
    """Finds weights [fan_out, fan_in] in Equinox's modules.

    It goes by the names of classes, because Equinox is not a dependency.
    """
    weights = ("weight", "weight_ih", "weight_hh")

    def holds_weights(node):
        modules = [base.__module__.partition(".")[0] for base in type(node).__mro__]
        return "equinox" in modules and any(hasattr(node, name) for name in weights)

    found = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=holds_weights):
        if not holds_weights(node):
            continue
        kind = " ".join(base.__name__ for base in type(node).__mro__)
        above = _paths.names_of(path)
        for names, leaf in _paths.leaves_with_names(node):
            # Other weights of more than two axes are convolutions.
            matrix = leaf.ndim == 2 or (leaf.ndim > 2 and "Linear" in kind)
            if re.search("Norm|Embedding", kind) or names[0] not in weights:
                matrix = False
            found[above + names] = DimensionNumbers(-1, -2) if matrix else None
    return found


def matrix_views(
    params: optax.Params, dimension_numbers: DimensionNumbersOrFn = None
) -> dict[str, _matrices.MatrixView | None]:
    """The view of each parameter by its path; None for the other optimizer's."""
    _trees.check_trainable(params)
    if dimension_numbers is None:
        dimension_numbers = default_dimension_numbers
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
    views: dict[str, _matrices.MatrixView | None] = {}
    leaves = _paths.leaves_with_path(params)
    for (name, leaf), numbers in zip(leaves, spread, strict=True):
        if name in views:
            raise ValueError(
                f"Two parameters have the path {name!r}. Rename one, without slashes."
            )
        try:
            views[name] = numbers and _matrices.make_view(leaf.shape, *numbers)
        except ValueError as error:
            message = f"Dimension numbers of parameter {name!r}: {error}"
            raise ValueError(message) from error
    return views


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, DimensionNumbers)


def matrices_only(
    tree: Any, dimension_numbers: DimensionNumbersOrFn
) -> dict[str, _matrices.MatrixView]:
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
    """Makes a printable table of the optimizer and the fans of every parameter.

    `matrix` goes to Dion or Muon, `other` to AdamW or `other_optimizer`.

    Args:
      params: any tree of arrays or abstract values.
      dimension_numbers: as for :func:`dion`.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((3, 4, 8))}
      >>> print(describe_partition(params))
      parameter  shape      optimizer  matrices  fan_in  fan_out
      embed      (9, 4)     other
      mlp        (3, 4, 8)  matrix     3         4       8
    """
    views = matrix_views(params, dimension_numbers)
    head = "parameter", "shape", "optimizer", "matrices", "fan_in", "fan_out"
    rows: list[Sequence[str]] = [head]
    for name, leaf in _paths.leaves_with_path(params):
        kind, sizes = "other", ("", "", "")
        if (view := views[name]) is not None:
            kind, sizes = "matrix", (math.prod(view.batch), view.fan_in, view.fan_out)
        rows.append([name, str(leaf.shape), kind, *map(str, sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def other_optimizer(
    given: optax.GradientTransformation | None,
    learning_rate: optax.ScalarOrSchedule,
    adam_learning_rate: optax.ScalarOrSchedule | None,
    eps: jax.typing.ArrayLike = EPSILON,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """The optimizer of embeddings, heads, norms and biases; AdamW if none is given.

    Without `adam_learning_rate` AdamW has the learning rate of the matrices.
    """
    _arguments.check_exclusive(
        adam_learning_rate=adam_learning_rate, other_optimizer=given
    )
    _arguments.check_numbers(
        learning_rate=learning_rate, adam_learning_rate=adam_learning_rate
    )
    if given is not None:
        return given
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    return optax.adamw(
        rate, 0.9, 0.95, eps, weight_decay=0.0, mu_dtype=mu_dtype, nesterov=nesterov
    )


def optimizer(
    matrices: Callable[[Any], optax.GradientTransformation],
    other: optax.GradientTransformation,
    dimension_numbers: DimensionNumbersOrFn,
) -> optax.GradientTransformationExtraArgs:
    """Combines an optimizer for the matrices with another for the rest.

    The rule for `dimension_numbers` sees the whole tree of parameters, but inside
    `optax.partition` an optimizer sees its own leaves only. So `matrices` makes its
    optimizer from a function from a masked tree to the dimension numbers of its leaves.
    """

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
                "matrix": matrices(functools.partial(_paths.map_with_path, numbers)),
                "other": other,
            },
            functools.partial(_paths.map_with_path, label),
        )

    init = lambda params: make(params).init(params)

    def update(updates, state, params=None, **extra_args):
        _trees.check_gradients(updates, params)
        return make(params).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
