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
_LAYER_NORM = re.compile(r"(.*_)?ln(_?\w)?|(.*_)?(layer_?|rms_?)norm(_?\w)?")
# Stacked or not; a projection inside of a norm must be named otherwise.
_SCALE_OF_NORM = re.compile(r"((.*_)?norm(_?\w)?|rms)/(w|weight)")
_CONVOLUTION = re.compile(r".*conv.*")
_QUERY = re.compile(r"(q|query)(_?proj(ection)?)?|wq(_b)?")
_ATTENTION_IN = re.compile(r"(q|k|v|query|key|value)(_?proj(ection)?)?|w(q|kv)_b")
_ATTENTION_OUT = re.compile(r"(attn_|attention_)?(o|out)(_?proj(ection)?)?")
# Gemma's: [heads, D, head_dim], behind an axis of keys and values, and back.
_EINSUM_IN = re.compile(r"(q|kv|qkv)_einsum")
_EINSUM_OUT = re.compile(r"attn_vec_einsum")

_WEIGHTS = ("weight", "weight_ih", "weight_hh")

Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
"""Names along the path of a parameter -> its shape."""


def _scan_axis(names: tuple[str, ...], shapes: Shapes) -> int | None:
    """The axis of a scan over layers: 0, or 1 as in MaxText; None without a scan.

    [layers, D, H*Dh] and [D, H, Dh] look alike; the norms' scales nearest in the tree,
    [layers, D], [D, layers] or [D], tell them apart, and where the layers are all
    kernels beside them.

    Raises:
      LookupError: if there is no scale.
    """
    scales = {o[:-1]: s for o, s in shapes.items() if o and o[-1].lower() == "scale"}
    for depth in range(len(names) - 1, -1, -1):
        near = [s for other, s in scales.items() if other[:depth] == names[:depth]]
        if not near:
            continue
        if any(len(s) != 2 for s in near):
            return None
        beside = [
            s for o, s in shapes.items() if o[:depth] == names[:depth] and len(s) > 2
        ]
        shape = shapes[names]
        axes = [a for a in (0, 1) if {s[a] for s in near} == {shape[a]}]
        if len(axes) == 2:  # [layers, D, ...] or [D, layers, ...]
            firsts, seconds = ({s[axis] for s in beside} for axis in (0, 1))
            return 1 if len(firsts) > 1 and len(seconds) == 1 else 0
        return axes[0] if axes else None
    raise LookupError(names)


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
    # Not farther up: a block named `pre_ln` holds matrices.
    if any(_LAYER_NORM.fullmatch(name) for name in lower[-2:]):
        return None
    if _SCALE_OF_NORM.fullmatch("/".join(lower[-2:])):
        return None
    if ndim == 2:
        return DimensionNumbers(-2, -1)
    if any(_EINSUM_IN.fullmatch(name) for name in lower):
        return DimensionNumbers(-2, (-3, -1))
    if any(_EINSUM_OUT.fullmatch(name) for name in lower):
        return DimensionNumbers((-3, -2), -1)
    side = _attention_side(names, shapes) if ndim in (3, 4) else None
    try:
        axis = _scan_axis(names, shapes)
    except LookupError:
        if side and ndim == 3:
            raise ValueError(
                f"the parameter {'/'.join(names)!r} of shape {shape} may be a stack of "
                "matrices [layers, fan_in, fan_out] or one attention kernel [D, heads, "
                "head_dim]: pass dimension_numbers to say which"
            ) from None
        axis = None
    first = 0 if axis == 1 else -3
    if side is None or (ndim == 3 and axis is not None):
        return DimensionNumbers(0 if axis == 1 and ndim == 3 else -2, -1)
    if side == "in":
        return DimensionNumbers(first, (-2, -1))
    return DimensionNumbers((first, -2), -1)


def _equinox_weights(params: Any) -> dict[tuple[str, ...], DimensionNumbers | None]:
    """Weights [fan_out, fan_in] in Equinox's modules, by the classes of these.

    By names, since Equinox is no dependency, as for Flax's boxes.
    """

    def holds_weights(node):
        modules = [base.__module__.partition(".")[0] for base in type(node).__mro__]
        return "equinox" in modules and any(hasattr(node, name) for name in _WEIGHTS)

    found = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=holds_weights):
        if not holds_weights(node):
            continue
        kind = " ".join(base.__name__ for base in type(node).__mro__)
        above = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for names, leaf in _paths.leaves_with_names(node):
            # A stack of layers has more axes; what else has them is a convolution.
            matrix = leaf.ndim == 2 or (leaf.ndim > 2 and "Linear" in kind)
            if re.search("Norm|Embedding", kind) or names[0] not in _WEIGHTS:
                matrix = False
            found[above + names] = DimensionNumbers(-1, -2) if matrix else None
    return found


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
      `value` and [H, Dh, D] for `out` or `attn_out_proj`, beside a `query`: the two
      head axes count as one side.
    * Gemma's `q_einsum` and `kv_einsum`, [H, D, Dh] behind an axis of keys and values:
      likewise.
    * The `weight` of an Equinox module is (fan_out, fan_in).
    * All else: the last two axes are (fan_in, fan_out), axes in front are a stack
      (`nn.scan` over layers, experts). If norms' scales nearby are [D, layers], the
      layers are the second axis, as in MaxText.

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
    equinox = _equinox_weights(params)

    def numbers_of(names):
        numbers = _default_numbers(names, shapes)
        return numbers and equinox.get(names, numbers)

    numbers = [numbers_of(names) for names, _ in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), numbers)
