"""The default rule for which parameters are matrices, and along which axes.

It reads shapes and paths: an embedding table and an output head have two axes like any
matrix, train without an error under Dion, and train badly.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from curvadion_jax import _paths

DimensionNumbers = optax.contrib.MuonDimensionNumbers

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
