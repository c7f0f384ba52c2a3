"""Which parameters are matrices, along which axes, and why.

`optax.contrib.MuonDimensionNumbers` says which axes of a parameter a product sums over
and which it produces; all others are a stack. None sends a parameter to the other
optimizer: embeddings and output heads have two axes, but train badly under Dion or
Muon.

The default rule goes by evidence in the tree. A bias has the output axes of its kernel.
The scale of a norm is as long as the model is wide, and [layers, width] under a scan
over layers. An output head is as long as the embedding. Names tell tables, heads and
convolutions. Where nothing tells, a parameter is left to the other optimizer, with a
warning.
"""

import collections
import functools
import math
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _evidence, _trees
from curvadion_jax._evidence import Array, Axes, Neighbour, Sizes, Tree

__all__ = ["Finding", "PartitionWarning", "default", "equinox", "explain", "haliax"]

DimensionNumbers = optax.contrib.MuonDimensionNumbers

# Names are in lower case; each pattern has to match a whole name.
_NO_PROJECTION = r"(?!.*(proj|dense|linear|mlp|map))"
_EMBEDDING = rf"{_NO_PROJECTION}(.*_|un|tok|pos)?emb(s|d|ed.*)?(_.*)?|wte|wpe"
_POSITIONS = rf"{_NO_PROJECTION}(.*_)?(rel)?pos(s|_.*|ition.*)?|wpe|rope"
_TABLE = (
    rf"{_NO_PROJECTION}((.*[_ ])?(vocab|table|token|latent|code|codebook|codevector"
    r"|envelope|prompt|prototype|quantizer|register|slot|centroid|probe)s?"
    r"|(latent|vocab)[_ ].*)"
)
_ANY_TABLE = f"{_TABLE}|{_POSITIONS}|{_evidence.LAYER_NORM}"
# Modules such as positionwise_ffn and latent_attention hold no table.
_TABLE_MODULE = rf"(?!.*(attention|attn|ffn|feed|wise))({_TABLE}|{_POSITIONS})"
_LOGITS = r"(?!pre_).*logit.*"
# Heads in some models, and hidden layers in others.
_FINAL = r"final_?proj(ection)?"
_HEAD = (
    rf"(?!multi|att)(.*_)?(head|classifier|readout)|heads|{_LOGITS}"
    # Numbers as Linen's; a plain Head_0 may be one of several of attention.
    r"|(?!multi|att)(.*[a-z]_?head|.*(classifier|class_?(embed|predictor)))_?\d*"
)
# Neither ConvNeXt's layers, nor conv_tp_weights, e3nn's weights of a tensor product.
_CONVOLUTION = (
    r"(?!pw|point|.*(convnext|convex|converg|convers|convention|conv_tp)).*conv.*"
)
_VECTOR = (  # RWKV's time_decay_w1 is a matrix
    r"(?!(time|log)_.*(proj|mlp|dense|linear|_w\d))"
    r"((.*_)?(bias|biases|(offset|shift|beta|scale|scaler|gain|norm|log|lambda)s?)(_?\d+)?"
    r"|(bias|norm|log|lambda|time)_.*|b(_?\d+)?)"
)
# Up to 16 steps are a window of a depthwise convolution; up to 64 may be one.
_SHORT_WINDOW, _LONG_WINDOW = 16, 64
_WINDOWS = (3, 5, 7)  # of most other convolutions
_VOCABULARY = 8192  # shorter ones are told by names alone
# Layers that may be as long as a vocabulary, as T5's and DeepSeek's.
_LONG_LAYER = r"w_?(i|o|1|2)(_\d)?|(up|down|gate)_proj|w?(q|kv)_?[ab](_proj)?"
_STATE_SPACE = r"[ABCDP](_?(re|im|real|imag|\d))?"  # in upper case
_DENSE = r"(out_?proj|dense|linear|fc)(_?\d+)?"
_LIKE_WEIGHT = (
    r"w([^a-z].*|[a-z\d]{0,2}(_.*)?|qkv.*)?|.*_w[a-z\d]?"
    r"|(?!.*_(alpha|beta|gamma)$).*(kernel|weight|matrix|proj|dense|linear|einsum|lora).*"
    r"|(.*_)?(mlp|attn|attention|ffn?|fc|layer|hidden|output)(_?\d+)?"
    r"|((mlp|ffn?)_)?(in|out|up|down|gate)(_?\d+)?"
    r"|gate_up|up_gate|encoder|decoder|l\d+|[a-z]2[a-z]|theta\d*|u"
    rf"|{_evidence.PROJECTION}|{_evidence.QUERY}"
)
_OUTPUT = r"(attn_|attention_)?(o|out|output|post)(_?proj(ection)?)?"
# Gemma's query is [heads, D, head_dim], after an axis of keys and values.
_EINSUM_QUERY, _EINSUM_OUTPUT = r"(q|kv|qkv)_einsum(_\d)?", r"attn_vec_einsum(_\d)?"


class PartitionWarning(UserWarning):
    """Nothing tells whether a parameter is a matrix, or along which axes."""


class Finding(NamedTuple):
    """What the default rule finds out about a parameter.

    Attributes:
      path: such as 'layers/attention/kernel'.
      shape: of the parameter.
      numbers: its dimension numbers, or None for the other optimizer.
      why: the evidence, in a few words.
      unknown: whether nothing tells; then `numbers` is None.
    """

    path: str
    shape: tuple[int, ...]
    numbers: DimensionNumbers | None
    why: str
    unknown: bool


class _Sides(NamedTuple):
    """The axes of a matrix's two sides, and what tells them."""

    first: Axes
    second: Axes
    why: str


def explain(params: Any) -> list[Finding]:
    """Applies the default rule, and says why; without a warning.

    Args:
      params: any tree of arrays or abstract values.

    Returns:
      A :class:`Finding` for each parameter, in the order of the leaves.

    Example:
      >>> params = {"kernel": jax.numpy.ones((4, 8)), "bias": jax.numpy.ones(8)}
      >>> [(found.path, found.why) for found in explain(params)]
      [('bias', 'a vector'), ('kernel', 'two axes')]
    """
    tree = _evidence.Tree(params)
    others = {array: why for array in tree.arrays if (why := _why_other(array, tree))}
    tables = _tables(others)
    heads = _heads(tree, tables)
    # A projection may be a head too: `w_out` is asked about.
    perhaps = {array for array in heads if array.is_projection}
    others |= dict.fromkeys(heads - perhaps, "as long as the vocabulary")
    rest = [array for array in tree.arrays if array not in others]
    asked = perhaps | _unusual(rest)
    sides = {a: None if a in asked else _sides(a, tree) for a in rest}
    votes = _votes(sides)
    hints = _hints(tree, tables, heads, sides, votes)

    def find(array):
        if array in others:
            return None, others[array], False
        if (found := sides[array]) is None:
            return None, "nothing tells", True
        first, second, why = found
        out_first = _is_out_first(array, found)
        if out_first is None:
            kind = _kind(array)
            ballot = votes[kind] or hints[kind] or [array.is_torch_weight]
            out_first = 2 * sum(ballot) > len(ballot)
        if out_first:
            first, second, why = second, first, f"{why}; (out, in)"
        if array.layers:
            why = f"{why}; layers on axis {', '.join(map(str, array.layers))}"
        one_or_more = lambda axes: axes if len(axes) > 1 else axes[0]
        return DimensionNumbers(one_or_more(first), one_or_more(second)), why, False

    return [Finding(array.path, array.shape, *find(array)) for array in tree.arrays]


def _unusual(rest: Sequence[Array]) -> set[Array]:
    """Arrays without a bias whose names are not those of matrices.

    They may be tables, or vectors of several heads or layers. So may a `weight` or
    `query_weight` where matrices with biases are named `kernel`, and arrays of lists,
    which have no names.
    """
    unsure = [array for array in rest if not array.bias]
    two_axes = [array for array in unsure if len(array.sizes) == 2]
    is_named = any(_has_name(array) for array in rest if len(array.sizes) == 2)
    styles = {
        array.words[-1]
        for array in rest
        if array.bias and array.matches(_evidence.WEIGHT, 1)
    }
    of_cells = r"(recurrent|hidden|input)_kernel|weight_([ih]h|v)"

    def is_of_other_style(array):
        is_weight = array.matches(r".*(kernel|weight).*|w", 1) and not array.is_lora
        if styles and is_weight and not array.matches(_evidence.QUERY, 1):
            return not (array.words[-1] in styles or array.matches(of_cells, 1))
        return is_named and not _has_name(array)

    has_no_name = lambda array: array.names[-1].isdigit() and not _has_name(array)
    found = {array for array in two_axes if is_of_other_style(array)}
    if sum(map(has_no_name, two_axes)) > 1:  # what is alone is the matrix
        found |= {array for array in unsure if has_no_name(array)}
    return found


def _why_other(array: Array, tree: Tree) -> str | None:
    """Why an array is no matrix; None if it may be one."""
    bias, sizes = array.bias, array.sizes
    if 0 in array.shape:
        return "no elements"
    if len(sizes) < 2:
        return "a vector"
    if array.shape[-1] == 1 and not array.matches(r"densegeneral(_\d+)?", 2):
        return "a last axis of 1"
    if array.is_scale:
        return "scale of a norm"
    if array.is_bias:
        return "a bias"
    if bias and bias.sizes == sizes:
        return "a scale, by its bias"
    if re.fullmatch(_STATE_SPACE, array.names[-1]) and not array.partner:
        return "state space, by its name"
    if array.matches(f"{_VECTOR}|{_evidence.NORM}", 1) and not array.partner:
        return "a vector, by its name"
    in_head = array.matches(_HEAD, 3) and array.matches(_DENSE, 2)
    is_head = _is_named_head(array, tree) or in_head
    if is_head and not (tree.is_hidden(array) or tree.leads_to_another(array)):
        return "a head, by its name"
    if _is_dense_of_embedding(array) and not array.is_torch_weight:
        if sizes[0] > 4 * sizes[-1]:
            return "an embedding, by its name"  # of one-hot tokens
    is_window = array.rank > 2 or min(sizes) <= _SHORT_WINDOW
    if _is_named_convolution(array) and is_window:
        return "a convolution, by its name"
    if bias and array.rank > 2:
        if bias.shape[-1] == 1 or (array.rank > 3 and len(bias.sizes) == 1):
            return "a convolution, by its bias"
    if len(sizes) == 4 and sizes[2] == sizes[3] and sizes[3] in _WINDOWS:
        return "a convolution, by its window"
    if bias and len(bias.sizes) < len(sizes):  # of a layer, whatever its name
        return None
    may_be_dense = _may_be_dense(array)
    if array.matches(_EMBEDDING, *((1,) if may_be_dense else (1, 2))):
        return "an embedding, by its name"
    in_table = array.matches(f"{_TABLE_MODULE}|{_evidence.LAYER_NORM}", 2)
    in_table = in_table and not (may_be_dense or array.is_projection)
    if array.matches(_ANY_TABLE, 1) or in_table:
        return "a table, by its name"
    return None


def _is_named_head(array: Array, tree: Tree) -> bool:
    """Whether it is named after an output head, or its module is."""
    # A module's name tells of its kernel, and not where several heads attend.
    in_named = _has_name(array) and not tree.has_query_and_key(array)
    is_named = array.matches(_HEAD, *((1, 2) if in_named else (1,)))
    # In each layer of a scan they are logits of attention or of gates.
    return is_named and not tree.is_in_scan(array)


def _may_be_dense(array: Array) -> bool:
    """Whether it may be the kernel of a dense layer, whatever the module's name.

    A `w` is one in Haiku's Linear: see `_is_doubtful`. A kernel of more than two axes
    is a DenseGeneral's.
    """
    is_general = len(array.sizes) > 2 and array.matches("kernel", 1)
    is_projection = array.matches(r"(.*_)?proj(ection)?(_.*)?", 1)
    is_dense = array.matches("w", 1) or is_general or is_projection
    return is_dense or _is_kernel_of_table(array)


def _may_be_convolution(array: Array) -> bool:
    """Whether an array may be (out, in, window), or (out, heads, head_dim).

    Or a depthwise one, which has one input: (window, 1, out), or (out, 1, window).
    """
    sizes = array.sizes
    if array.rank > 2 and len(sizes) == 2 and array.shape[-2] == 1:
        is_window = sizes[0] <= _LONG_WINDOW
        return array.is_torch_weight or (is_window and not array.is_query)
    if array.bias is None:
        return False
    out_first = array.bias.sizes == sizes[:1] != sizes[-1:]
    return out_first and not array.matches(_OUTPUT, 1, 2)


def _is_dense_of_embedding(array: Array) -> bool:
    return array.matches("embed|embedding", 3) and array.matches(_DENSE, 2)


def _is_kernel_of_table(array: Array) -> bool:
    """Whether a Dense, which has a kernel, may be named `embedding` or `positions`."""
    in_table = array.matches(f"(?!un)({_EMBEDDING})|{_TABLE_MODULE}", 2)
    return array.matches("kernel", 1) and in_table


def _is_named_convolution(array: Array) -> bool:
    of_its_own = array.is_projection and len(array.sizes) == 2
    return array.matches(_CONVOLUTION, *((1,) if of_its_own else (1, 2)))


def _heads(tree: Tree, tables: Sequence[Array]) -> set[Array]:
    """For each embedding, the only other array as long as its vocabulary.

    If several arrays are as long, the length may be another width. So it may in a scan
    over layers, or of keys and values: bytes are a vocabulary of 256.
    """
    heads = set()
    for vocabulary in {table.sizes[0] for table in tables}:
        rest = [a for a in tree.arrays if len(a.sizes) > 1 and a not in tables]
        long = [array for array in rest if vocabulary in array.sizes]
        only = long[0] if len(long) == 1 else None
        if only and not (only.is_query or tree.is_in_scan(only)):
            heads.add(only)
    return heads


def _tables(others: Iterable[Array]) -> list[Array]:
    """The embeddings of a vocabulary, [vocabulary, D]."""
    return [
        array
        for array in others
        if array.matches(_EMBEDDING, 1, 2, 3)
        and not array.matches(_POSITIONS, 1, 2, 3)
        and len(array.sizes) == 2
    ]


def _has_name(array: Array) -> bool:
    """Whether its name is a matrix's."""
    return array.is_lora or array.matches(_LIKE_WEIGHT, 1)


def _sides(array: Array, tree: Tree) -> _Sides | None:
    """The axes of one side and of the other; None if nothing tells."""
    axes, sizes = array.axes, array.sizes
    bias = array.bias.sizes if array.bias else ()
    if array.partner and not array.is_lora:
        return None  # LoRA's A and B, or a state space's
    several = len(array.shape) > 2
    # A query's factors of LoRA are products within each head.
    if several and array.matches(_EINSUM_QUERY, 1, 2) and not array.partner:
        *_, heads, width, head_dim = range(len(array.shape))
        return _Sides((width,), (heads, head_dim), "[heads, D, head_dim], by its name")
    if several and array.matches(_EINSUM_OUTPUT, 1, 2):
        *_, heads, head_dim, width = range(len(array.shape))
        return _Sides((heads, head_dim), (width,), "[heads, head_dim, D], by its name")
    if len(sizes) == 2:
        is_doubtful = _is_doubtful(array, tree) or _may_be_of_vocabulary(array, tree)
        return None if is_doubtful else _Sides(axes[:1], axes[1:], "two axes")
    if array.partner:
        return _sides_of_factor(array, array.partner)
    if not bias:
        return _sides_without_bias(array, tree)
    ambiguous = len(bias) > 1 and sizes[0] == sizes[1]
    if _may_be_convolution(array):
        return None
    if bias in (sizes[1:], sizes[:1]) and not ambiguous:
        return _Sides(axes[:1], axes[1:], "its bias has the axes of one side")
    if bias == (sizes[0], *sizes[2:]) or (len(sizes) == 3 and bias == sizes[:2]):
        return _Sides(axes[1:2], axes[2:], "a stack, like its bias")
    return _output_of_heads(array, tree) if bias == sizes[2:] else None


def _is_doubtful(array: Array, tree: Tree) -> bool:
    """Whether an array of two axes may well be something else than a matrix."""
    bias = array.bias
    is_w = array.matches("w", 1) and array.matches(f"{_EMBEDDING}|{_ANY_TABLE}", 2)
    if not bias and (is_w or _is_kernel_of_table(array)):
        return True  # a Linear or a Dense, or a table
    if _is_named_head(array, tree) and not tree.leads_to_another(array):
        return True  # a head, or one model's width to another's
    in_embedding = _is_dense_of_embedding(array) and not tree.is_hidden(array)
    is_final = array.matches(_FINAL, 1, 2) and not tree.is_in_scan(array)
    if is_final or in_embedding:
        return True  # a head or a table, or a hidden layer
    is_layer = array.matches(f"{_evidence.WEIGHT}|{_evidence.PROJECTION}", 1)
    if array.rank == 3 and array.shape[0] == 1 and not (bias or is_layer):
        return True  # tokens or queries (1, n, D), for all of a batch
    may_be_window = not bias or min(array.sizes) <= _LONG_WINDOW
    if may_be_window and _is_named_convolution(array):
        return True  # a layer of a ConvNet or of a graph, or a convolution
    return array.rank > 2 and _may_be_convolution(array)


def _may_be_of_vocabulary(array: Array, tree: Tree) -> bool:
    """Whether it is so long that it may be a table, or a head, of another name."""
    short, long = sorted(array.sizes)
    is_long = long >= _VOCABULARY and long > 16 * short
    of_layer = array.matches(_LONG_LAYER, 1, 2) or tree.is_in_scan(array)
    if not is_long or array.partner or of_layer or len(tree.arrays) == 1:
        return False
    return array.bias is None or array.bias.sizes == (long,)


def _sides_of_factor(array: Array, partner: Array) -> _Sides | None:
    """The sides of LoRA's A or B: one is [*stack, *in, rank], one [*stack, rank, *out].

    Which of them is A does not matter: PyTorch's are (out, in).
    """
    shape, other = array.shape, partner.shape
    axes = tuple(range(len(shape)))
    why = "a factor, by its name and the other one"
    # The longest stack that fits: there may be as many layers as the rank is high.
    for stack in reversed(range(len(shape) - 1)):
        if shape[:stack] != other[:stack] or len(other) < stack + 2:
            continue
        if shape[-1] == other[stack]:
            return _Sides(axes[stack:-1], axes[-1:], why)
        if shape[stack] == other[-1]:
            return _Sides(axes[stack : stack + 1], axes[stack + 1 :], why)
    return None


def _sides_without_bias(array: Array, tree: Tree) -> _Sides | None:
    """The sides of an array of three axes or more, by norms and neighbours."""
    axes, sizes = array.axes, array.sizes
    width = max(tree.widths.intersection(sizes), default=None)  # D
    of_attention = array.is_query or array.matches(_OUTPUT, 1, 2)
    is_expert = array.matches(r".*(expert|moe).*", 1, 2, 3) and not of_attention
    if len(sizes) == 3:
        if array.is_torch_weight and sizes[-1] in _WINDOWS:
            return None  # may be (out, in, window)
        if not array.is_query and _is_mirrored(sizes, width, tree.beside(array)):
            is_short = sizes[0] in _WINDOWS and array.matches(_evidence.WEIGHT, 1)
            if is_short and not is_expert:
                return None  # may be (window, in, out)
            return _Sides(axes[1:2], axes[2:], "a stack, with its transpose next to it")
        if is_expert:
            return None  # may be [D, experts, F]
        if width in (None, sizes[2]) and (found := _output_of_heads(array, tree)):
            return found
        if array.is_query and sizes[1] == width != sizes[0]:
            why = "[heads, D, head_dim], by its name and a norm"
            return _Sides(axes[1:2], (axes[0], axes[2]), why)
    # [D, heads, head_dim], or with an axis of queries, keys and values on either side.
    place = 1 if len(sizes) == 4 and sizes[0] in (2, 3) else 0
    beside = [other.sizes for other in tree.beside(array)]
    outputs = [other for other in beside if len(other) > 2]
    # [stack, n, n] looks like heads. They have an output [n, n, D] next to them.
    split = sizes[-1] != sizes[-2] or any(o[:-1] == sizes[-2:] for o in outputs)
    if sizes[place] == width and sizes.count(width) == 1 and split:
        why = f"its {width} inputs are a norm's width"
        return _Sides(axes[place : place + 1], axes[place + 1 :], why)
    return None


def _is_mirrored(sizes: Sizes, width: int | None, beside: Iterable[Neighbour]) -> bool:
    """Whether [experts, D, F] has [experts, F, D] next to it, or [2, D, F] has [F, D].

    Also where gates are fused: [experts, D, 2F].
    """
    stack, *matrix = sizes
    for shape, other, is_query in beside:
        if is_query or len(other) not in (2, 3):
            continue
        transposed = list(shape[-2:]) == matrix[::-1] != matrix
        across = width in matrix and width == other[-1 - matrix.index(width)]
        fused = len(other) == 3 and other[0] == stack and across
        if transposed or (fused and matrix[0] != matrix[1]):
            return True
    return False


def _output_of_heads(array: Array, tree: Tree) -> _Sides | None:
    """[heads, head_dim, D], with a query [D, heads, head_dim] or alike next to it."""
    if len(array.sizes) != 3:
        return None
    heads, head_dim, width = array.sizes
    for other in {neighbour.sizes for neighbour in tree.beside(array)}:
        if len(other) < 3 or other == array.sizes:
            continue
        has_heads = heads == other[-2] or (heads == other[0] and other[1] == width)
        alike = has_heads and other[-1] == head_dim
        # Values may have another head_dim.
        if alike or (other[-2] == heads and other[0] in tree.widths):
            why = "[heads, head_dim, D], by a query next to it"
            return _Sides(array.axes[:2], array.axes[2:], why)
    return None


def _is_out_first(array: Array, sides: _Sides) -> bool | None:
    """Whether an array is (out, in), by its bias or heads; None if nothing tells."""
    sizes = array.sizes
    if array.bias and len(bias := array.bias.sizes) < len(sizes):
        first, last = bias == sizes[: len(bias)], bias[-1:] == sizes[-1:]
        if first != last:
            return first
    if array.partner:
        return None
    heads = len(sides.first), len(sides.second)
    if array.is_query and heads != (1, 1):
        return heads == (2, 1)
    if heads == (1, 2):  # [D, heads, head_dim]
        return array.matches(_OUTPUT, 1, 2)
    return None


def _kind(array: Array) -> tuple[str, int]:
    """What arrays vote together: the last name, and the number of axes.

    `W`, `Wi` and `w1` are one name: a codebase writes either x @ W or W @ x.
    """
    name = array.names[-1].lower()
    return "w" if re.fullmatch(r"w_?[a-z\d]{0,2}", name) else name, len(array.sizes)


def _votes(sides: Mapping[Array, _Sides | None]) -> dict[tuple[str, int], list[bool]]:
    """Whether arrays that tell are (out, in), by their kind.

    An output projection has no vote: it may be [D, heads, head_dim] where others are
    (in, out).
    """
    votes = collections.defaultdict(list)
    for array, found in sides.items():
        if found and not array.matches(_OUTPUT, 1, 2):
            vote = _is_out_first(array, found)
            votes[_kind(array)] += [] if vote is None else [vote]
    return votes


def _hints(
    tree: Tree,
    tables: Iterable[Array],
    heads: Iterable[Array],
    sides: Mapping[Array, _Sides | None],
    votes: Mapping[tuple[str, int], list[bool]],
) -> dict[tuple[str, int], list[bool]]:
    """Whether arrays are probably (out, in), by their kind, where no bias tells.

    A head's outputs are as many as an embedding has rows. (A head may be stored like
    its embedding: it says nothing where others of its name are (in, out).) A gated MLP
    has two matrices from the model's width and one back to it.
    """
    hints = collections.defaultdict(list)
    vocabularies = {table.sizes[0] for table in tables}
    in_first = {name for (name, _), said in votes.items() if said and not any(said)}
    for array in heads:
        tells = len(array.sizes) == 2 and array.sizes[0] != array.sizes[1]
        if tells and _kind(array)[0] not in in_first:
            hints[_kind(array)].append(array.sizes[0] in vocabularies)

    mlps = collections.defaultdict(list)
    for array, found in sides.items():
        if found and len(found.first) == len(found.second) == 1:
            lengths = array.shape[found.first[0]], array.shape[found.second[0]]
            mlps[array.names[:-2], _kind(array)].append(lengths)
    for (_, kind), matrices in mlps.items():
        (pair, number), *rest = collections.Counter(matrices).most_common()
        is_width = [length in tree.widths for length in pair]
        if number == 2 and rest == [(pair[::-1], 1)] and is_width[0] != is_width[1]:
            hints[kind].append(is_width[1])
    return hints


def default(
    params: Any, given: Mapping[str, DimensionNumbers | None] | None = None
) -> Any:
    """Applies the default rule: which parameters are matrices, along which axes.

    :func:`curvadion_jax.describe_partition` shows the result, with the evidence. To the
    other optimizer go

    * vectors, also stacked over layers or with axes of length 1,
    * embeddings and other tables, output heads, convolutions and parameters of
      state-space models: by their names, by a side as long as the vocabulary that one
      other parameter has, or by a bias that is shared over a window,
    * with a warning, what has two axes and no bias, and another name than the tree's
      matrices; what may be a convolution, or a head or a table of another name; and
      what has more axes that nothing tells apart.

    All else are matrices from the first axis to the last, or from the last to the first
    where biases tell so or the parameter is an attribute `weight`, as of Equinox. Of
    three axes and more, the rule tells apart

    * layers on the first axis, or on the second as in MaxText, or on the next one too,
      by the norms' scales,
    * stacks such as experts, by their biases or a transpose next to them,
    * heads, which count as one side together with their dimension, by a bias, a norm's
      width or the query next to them,
    * factors of LoRA, by their names and the rank that both have.

    `optax.partition` or `optax.masked` around an optimizer hides parameters that tell:
    give `dimension_numbers` there.

    Args:
      params: any tree of arrays or abstract values, nnx state included.
      given: dimension numbers by a parameter's path, or by a part of paths such as
        `mlp/gate`. They replace the rule's.

    Returns:
      A tree of the same structure, with dimension numbers or None.

    Raises:
      ValueError: if no parameter has a given path.

    Example:
      >>> params = {"embed": jax.numpy.ones((9, 4)), "mlp": jax.numpy.ones((4, 8))}
      >>> default(params)["mlp"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=1)
      >>> default(params)["embed"] is None
      True
      >>> default(params, {"mlp": None})["mlp"] is None
      True
    """
    findings = explain(params)
    every = [found.path for found in findings]
    chosen = {}
    for part, numbers in (given or {}).items():
        paths = [path for path in every if f"/{part}/" in f"/{path}/"]
        if not paths:
            raise ValueError(
                f"given names {part!r}, and no parameter has it in its path. Give a "
                "part of a path as curvadion_jax.describe_partition(params) prints it."
            )
        chosen |= dict.fromkeys(paths, numbers)
    warn(findings, chosen)
    return _as_tree(params, findings, chosen)


def equinox(params: Any) -> Any:
    """The default rule, but with the axes of Equinox's modules by their classes.

    A `weight` of a class of `equinox.nn`, or of one derived from it, is (fan_out,
    fan_in). Weights of convolutions are no matrices, nor are those of any module whose
    class is a norm or an embedding by its name. Other modules are left to the rule.

    Args:
      params: a model, or a tree with models in it, such as `eqx.filter` returns.

    Returns:
      A tree of the same structure, with dimension numbers or None.
    """
    weights = _evidence.TORCH_WEIGHTS

    def classes(node):
        return [f"{x.__module__}.{x.__name__}" for x in type(node).__mro__]

    def is_norm_or_table(node):
        return any(re.search("(Norm|Embedding)$", name) for name in classes(node))

    def is_known(node):
        every = classes(node)
        of_nn = any(name.startswith("equinox.nn.") for name in every)
        of_equinox = any(name.startswith("equinox.") for name in every)
        is_module = of_nn or (of_equinox and is_norm_or_table(node))
        return is_module and any(hasattr(node, name) for name in weights)

    chosen = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=is_known):
        if not is_known(node):
            continue
        is_linear = any("Linear" in name for name in classes(node))
        for names, leaf in _trees.leaves_with_names(node):
            # Other weights of more than two axes are convolutions.
            is_matrix = leaf.ndim == 2 or (leaf.ndim > 2 and is_linear)
            if is_norm_or_table(node) or names[0] not in weights:
                is_matrix = False
            numbers = DimensionNumbers(-1, -2) if is_matrix else None
            chosen["/".join((*_trees.names_of(path), *names))] = numbers
    return _with_axes(params, chosen)


def haliax(params: Any) -> Any:
    """The default rule, but with the axes of Haliax's `Linear` by their names.

    Args:
      params: a model, or a tree with models in it, such as Levanter's.

    Returns:
      A tree of the same structure, with dimension numbers or None.
    """

    def is_linear(node):
        has = functools.partial(hasattr, node)
        # A convolution has a kernel_size besides, and is left to the rule.
        of_sides = has("weight") and has("In") and has("Out") and not has("kernel_size")
        return of_sides and hasattr(node.weight, "axes")

    def places(axes, of):
        several = axes if isinstance(axes, tuple | list) else (axes,)
        return tuple(of.index(axis) for axis in several)

    chosen = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=is_linear):
        if is_linear(node):
            axes = node.weight.axes
            numbers = DimensionNumbers(places(node.In, axes), places(node.Out, axes))
            for names, _ in _trees.leaves_with_names(node.weight):
                chosen["/".join((*_trees.names_of(path), "weight", *names))] = numbers
    return _with_axes(params, chosen)


def _with_axes(params: Any, axes: Mapping[str, DimensionNumbers | None]) -> Any:
    """The default rule with other axes by path; it still tells heads and tables."""
    findings = explain(params)
    others = {each.path for each in findings if not each.numbers and not each.unknown}
    chosen = {path: each for path, each in axes.items() if path not in others}
    warn(findings, chosen)
    return _as_tree(params, findings, chosen)


def _as_tree(
    params: Any,
    findings: Sequence[Finding],
    chosen: Mapping[str, DimensionNumbers | None],
) -> Any:
    numbers = [chosen.get(found.path, found.numbers) for found in findings]
    return jax.tree.unflatten(jax.tree.structure(params), numbers)


def warn(findings: Sequence[Finding], chosen: Container[str] = ()) -> None:
    """Warns of the unknown parameters of a tree, but for the paths that were chosen."""
    unknown = [each for each in findings if each.unknown and each.path not in chosen]
    if not unknown:
        return
    size = lambda several: sum(math.prod(each.shape) for each in several)
    arrays = ", ".join(f"{found.path} {found.shape}" for found in unknown)
    known = [f"/{found.path}/" for found in findings if not found.unknown]

    def short(path):
        """The last two names, if no other parameter has them."""
        part = "/".join(path.split("/")[-2:])
        return path if any(f"/{part}/" in other for other in known) else part

    given = dict.fromkeys(short(found.path) for found in unknown)
    warnings.warn(
        f"AdamW trains {size(unknown) / size(findings):.1%} of the parameters, because "
        f"nothing tells whether these are matrices: {arrays}. To choose, pass "
        "dimension_numbers=lambda params: curvadion_jax.default_dimension_numbers("
        f"params, {given}), with curvadion_jax.DimensionNumbers(reduction_axis, "
        "output_axis) in place of None for a matrix.",
        PartitionWarning,
        stacklevel=3,
    )
