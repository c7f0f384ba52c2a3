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
import dataclasses
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _paths

DimensionNumbers = optax.contrib.MuonDimensionNumbers
Axes = Sizes = tuple[int, ...]

# Names are in lower case; each pattern has to match a whole name.
_NO_PROJECTION = r"(?!.*(proj|dense|linear|mlp|map))"
_EMBEDDING = rf"{_NO_PROJECTION}(.*_|un|tok|pos)?emb(s|ed.*)?(_.*)?|wte|wpe"
_POSITIONS = rf"{_NO_PROJECTION}(.*_)?(rel)?pos(s|_.*|ition.*)?|wpe|rope"
_TABLE = (
    r"(.*[_ ])?(vocab|table|token|latent|code|codebook|codevector|grid|probe|prompt"
    r"|prototype|register|slot|anchor|centroid)s?|(latent|vocab)[_ ].*"
)
_HEAD = (
    r"(?!multi|att)(.*_|lm|output)?(head|classifier|readout)|heads|(?!pre_).*logit.*"
)
_CONVOLUTION = r"(?!pw|point).*conv.*"
_LAYER_NORM = r"(.*_)?(ln|layer_?norm|rms_?norm)(_?\w)?"
_NORM = rf"{_LAYER_NORM}|.*norm(_?\w)?|rms"
_SCALE = r"(.*_)?(scale|gamma)|gamma_.*"
_VECTOR = (
    r"(.*_)?(bias|offset|shift|beta|norm|log|lambda)|(bias|norm|log|lambda|time)_.*|b"
)
_STATE_SPACE = r"[ABCDP](_?(re|im|real|imag|\d))?"  # in upper case
_WEIGHT = r"kernel|weights?|w"
_LIKE_WEIGHT = r"w.*|.*(kernel|weight|matrix|proj|dense|linear|einsum|lora).*"
_DENSE = r"(out_?proj|dense|linear|fc)(_?\d+)?"
# Gemma's query is [heads, D, head_dim], after an axis of keys and values.
_EINSUM_IN, _EINSUM_OUT = r"(q|kv|qkv)_einsum(_\d)?", r"attn_vec_einsum(_\d)?"
_ATTENTION_IN = (
    r"(w_?|to_)?(q|k|v|kv|qkv|query|key|value)(_?proj(ection)?|_kernel|_w|_b)?"
)
_ATTENTION_OUT = r"(attn_|attention_)?(o|out|output|post)(_?proj(ection)?)?"
# Of Equinox and other modules in PyTorch's order, (out, in).
_TORCH_WEIGHTS = [
    jax.tree_util.GetAttrKey(name) for name in ("weight", "weight_ih", "weight_hh")
]


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


@dataclasses.dataclass(eq=False)
class _Array:
    """A parameter, and what the parameters around it say of it."""

    path: str
    names: tuple[str, ...]  # along the path, as they are written
    shape: tuple[int, ...]
    is_torch_weight: bool  # an attribute `weight` of an object
    layers: int | None = None  # the axis of a scan over layers
    bias: "_Array | None" = None
    is_bias: bool = False

    @functools.cached_property
    def words(self) -> list[str]:
        """The names that say something, in lower case."""
        return [n.lower() for n in self.names if not n.isdigit() and n != "layers"]

    @functools.cached_property
    def is_scale(self) -> bool:
        of_norm = self.matches("weights?|w|g", 1) and self.matches(f"{_NORM}|scale", 2)
        return self.matches(_SCALE, 1) or of_norm

    @functools.cached_property
    def is_query(self) -> bool:
        """Whether it is a projection to queries, keys or values, by its name."""
        return self.matches(_ATTENTION_IN, 1, 2)

    @functools.cached_property
    def axes(self) -> Axes:
        """The axes of one layer that are longer than 1."""
        axes = enumerate(self.shape)
        return tuple(axis for axis, n in axes if n != 1 and axis != self.layers)

    @functools.cached_property
    def sizes(self) -> Sizes:
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def bias_sizes(self) -> Sizes:
        return self.bias.sizes if self.bias else ()

    def matches(self, pattern: str, *places: int) -> bool:
        """Whether a whole name matches, at one of these places from the end."""
        found = [self.words[-place] for place in places if place <= len(self.words)]
        return any(re.fullmatch(pattern, word) for word in found)


class _Tree:
    """All parameters, and which are below a path."""

    def __init__(self, params: Any):
        self.arrays: list[_Array] = []
        self.below: dict[tuple[str, ...], list[_Array]] = collections.defaultdict(list)
        self._beside = {}
        leaves = _paths.leaves_with_names(params)
        keys = [path for path, _ in jax.tree.leaves_with_path(params)]
        for (names, leaf), path in zip(leaves, keys, strict=True):
            name = "/".join(names)
            is_torch_weight = any(key in path for key in _TORCH_WEIGHTS)
            array = _Array(name, _split(name), leaf.shape, is_torch_weight)
            self.arrays.append(array)
            for depth in range(len(array.names)):
                self.below[array.names[:depth]].append(array)
        near = functools.cache(self._norms_and_kernels)
        for array in self.arrays:
            array.layers = _layers_axis(array, near)
        self._find_biases()
        scales = [array for array in self.arrays if array.is_scale]
        self.widths = {array.sizes[-1] for array in scales if array.sizes}
        self.others = {a: why for a in self.arrays if (why := _why_other(a, self))}
        heads = _find_heads(self)
        self.others |= dict.fromkeys(heads, "as long as the vocabulary")
        # How many arrays have a side of a length, without tables.
        told = [a for a in self.arrays if a not in self.others or len(a.sizes) < 2]
        self.counts = collections.Counter(n for a in told for n in set(a.sizes))

    def _find_biases(self) -> None:
        """Pairs `kernel` with `bias`, `w` with `b`, `wi_0` with `wi_0_bias`."""
        by_names = {array.names: array for array in self.arrays}
        for array in self.arrays:
            *above, last = array.names
            stem = re.sub(rf"({_WEIGHT})$", "", last)
            stem = stem if stem != last else f"{last}_"
            # In a pair (kernel, bias), as of stax, names are positions.
            endings = ["1"] if last == "0" else [stem + "bias", stem + "b"]
            for ending in endings:
                bias = by_names.get((*above, ending))
                if bias and (last != "0" or bias.sizes == array.sizes[-1:]):
                    array.bias, bias.is_bias = bias, True

    def _norms_and_kernels(self, prefix: tuple[str, ...]):
        near = self.below[prefix]
        scales = [array.shape for array in near if array.is_scale]
        return scales, [array.shape for array in near if len(array.shape) > 2]

    def beside(self, array: _Array) -> set[tuple[tuple[int, ...], Sizes, bool]]:
        """Shape, sizes and whether it is a query's, in the modules next to an array's."""
        key = array.names[:-2], len(array.names)
        if key not in self._beside:
            near = [o for o in self.below[key[0]] if len(o.names) <= key[1]]
            self._beside[key] = {(o.shape, o.sizes, o.is_query) for o in near}
        return self._beside[key]


def _split(path: str) -> tuple[str, ...]:
    """A name may be a path: Haiku's `gpt/~/embed`, `wte.weight`, a flattened tree."""
    path = re.sub(r"\('|', '|'\)", "/", path)
    path = re.sub(r"/(value/)?(data_)?array$", "", path)  # of Haliax and Penzai
    return tuple(re.findall(r"[^/.~]+", path)) or ("",)


def _layers_axis(array: _Array, near: Callable) -> int | None:
    """The axis of a scan over layers: 0, or 1 as in MaxText; None without a scan.

    Under a scan the scales of the nearest norms are [layers, width] or [width, layers].
    They have the axis of the layers alike, and share it with most kernels.
    """
    for depth in reversed(range(len(array.names))):
        scales, kernels = near(array.names[:depth])
        if scales and kernels:
            break
    else:
        return None
    if len(array.shape) < 2 or any(len(scale) < 2 for scale in scales):
        return None
    found = {}
    for axis in (0, 1):
        alike = sum(kernel[axis] == array.shape[axis] for kernel in kernels)
        told = {scale[axis] for scale in scales} == {array.shape[axis]}
        if told and 2 * alike > len(kernels):
            found[axis] = alike
    return max(found, key=found.__getitem__, default=None)


def _why_other(array: _Array, tree: _Tree) -> str | None:
    """Why an array is no matrix; None if it may be one."""
    if 0 in array.shape:
        return "no elements"
    if len(array.sizes) < 2:
        return "a vector"
    if array.shape[-1] == 1:
        return "one output"
    if array.is_scale:
        return "scale of a norm"
    if array.is_bias:
        return "a bias"
    if re.fullmatch(_STATE_SPACE, array.names[-1]):
        return "state space, by its name"
    if array.matches(f"{_VECTOR}|{_NORM}", 1):
        return "a vector, by its name"
    if array.matches(_HEAD, 1, 2):
        return "a head, by its name"
    in_head = array.matches(f"{_HEAD}|embed|embedding", 3) and array.matches(_DENSE, 2)
    if in_head and not set(array.sizes) <= tree.widths:  # between norms it is hidden
        return "a head, by its name"
    if array.matches(_CONVOLUTION, 1, 2):
        return "a convolution, by its name"
    if bias := array.bias:
        apart = len(array.shape) - (array.layers is not None)
        if bias.shape[-1] == 1 or (apart > 3 and len(bias.sizes) == 1):
            return "a convolution, by its bias"
    if len(array.sizes) == 4 and array.sizes[2:] in ((3, 3), (5, 5), (7, 7)):
        return "a convolution, by its window"
    if array.bias is None and array.matches(_EMBEDDING, 1, 2):
        return "an embedding, by its name"
    if array.matches(f"{_TABLE}|{_POSITIONS}|{_LAYER_NORM}", 1, 2):
        return "a table, by its name"
    return None


def _sides(array: _Array, tree: _Tree) -> tuple[Axes, Axes, str] | None:
    """The axes of one side and of the other, and why; None if nothing tells."""
    k, b, at = array.sizes, array.bias_sizes, array.axes
    if array.matches(_EINSUM_IN, 1, 2) and len(array.shape) > 2:
        *_, heads, width, head_dim = range(len(array.shape))
        return (width,), (heads, head_dim), "[heads, D, head_dim], by its name"
    if array.matches(_EINSUM_OUT, 1, 2) and len(array.shape) > 2:
        *_, heads, head_dim, width = range(len(array.shape))
        return (heads, head_dim), (width,), "[heads, head_dim, D], by its name"
    if len(k) == 2:
        # A table of the model's width has rows that nothing else has.
        alone = any(tree.counts[n] == 1 for n in k) and tree.widths.intersection(k)
        if alone and not b and not array.matches(_LIKE_WEIGHT, 1):
            return None
        return at[:1], at[1:], "two axes"
    if b and b in (k[1:], k[:1]) and (len(b) == 1 or k[0] != k[1]):
        return at[:1], at[1:], "its bias has the axes of one side"
    if b and (b == (k[0], *k[2:]) or (len(k) == 3 and b == k[:2])):
        return at[1:2], at[2:], "a stack, like its bias"
    return _sides_by_neighbours(array, tree)


def _sides_by_neighbours(array: _Array, tree: _Tree) -> tuple[Axes, Axes, str] | None:
    """The sides of an array of three axes and more, by norms and what is beside it."""
    k, b, at = array.sizes, array.bias_sizes, array.axes
    beside = tree.beside(array)
    widest = max(tree.widths.intersection(k), default=None)  # the model's width, D

    def mirrors(shape, s, is_query):
        """[experts, D, F] and [experts, F, D], or [2, D, F] and [F, D]."""
        if is_query or len(s) not in (2, 3):
            return False
        alike = len(s) == 3 and s[0] == k[0] and k[1] != k[2]
        across = widest in k[1:] and widest == s[-(k[1:].index(widest) + 1)]
        return shape[-2:] == k[:0:-1] != k[1:] or (alike and across)

    if len(k) == 3 and not b and not array.is_query:
        if any(itertools.starmap(mirrors, beside)):
            return at[1:2], at[2:], "a stack, with its transpose beside it"
    if len(k) == 3 and not b and k[1] == k[2] == widest != k[0]:
        return at[1:2], at[2:], "a stack of square matrices"
    heads = [s for _, s, _ in beside if len(s) > 2 and s != k]
    if len(k) == 3 and b in ((), k[2:]) and widest in (None, k[2]):
        for s in heads:  # [..., heads, head_dim], [heads, D, head_dim], [D, heads, ...]
            alike = k[0] in (s[0], s[-2]) and k[1] == s[-1]
            if alike or (k[0] == s[-2] and s[0] in tree.widths):
                return at[:2], at[2:], "[heads, head_dim, D], by what is beside it"
    if len(k) == 3 and not b and k[1] == widest != k[0]:
        if array.is_query:
            return at[1:2], (at[0], at[2]), "[heads, D, head_dim], by name and norms"
    # [D, heads, head_dim], also fused: D, queries or keys or values, ...
    first = 1 if len(k) == 4 and k[0] in (2, 3) else 0
    split = k[-1] != k[-2] or any(s[:-1] == k[-2:] for s in heads)
    if not b and k[first] == widest and k.count(widest) == 1 and split:
        return at[first : first + 1], at[first + 1 :], f"[{widest}, ...] after a norm"
    return None


def _out_first(array: _Array, sides: tuple[Axes, Axes, str]) -> bool | None:
    """Whether an array is (out, in), by its bias or heads; None if nothing tells."""
    k, b = array.sizes, array.bias_sizes
    first, last = b == k[: len(b)], b[-1:] == k[-1:]
    if b and len(b) < len(k) and first != last:
        return first
    heads = [len(axes) for axes in sides[:2]]
    if array.is_query and heads != [1, 1]:
        return heads == [2, 1]
    if array.matches(_ATTENTION_OUT, 1, 2) and heads == [1, 2]:
        return True
    return None


def _vote(tree: _Tree, sides: Mapping[_Array, Any]) -> dict[str, list[bool]]:
    """Whether arrays that tell are (out, in), by their last name.

    An output projection has no vote: it may be [D, heads, head_dim] where others are
    (in, out).
    """
    votes = collections.defaultdict(list)
    for array in tree.arrays:
        if sides.get(array) and not array.matches(_ATTENTION_OUT, 1, 2):
            vote = _out_first(array, sides[array])
            votes[array.names[-1]] += [] if vote is None else [vote]
    return votes


def _find_heads(tree: _Tree) -> set[_Array]:
    """For each embedding, the only other array as long as its vocabulary.

    If several arrays are as long, the length may be another width.
    """
    tables = [
        array
        for array in tree.others
        if array.matches(_EMBEDDING, 1, 2, 3)
        and not array.matches(_POSITIONS, 1, 2, 3)
        and len(array.sizes) == 2
    ]
    heads = set()
    for vocabulary in {table.sizes[0] for table in tables}:
        long = [
            array
            for array in tree.arrays
            if vocabulary in array.sizes
            and len(array.sizes) > 1
            and array not in tables
        ]
        if len(long) == 1:
            heads.add(long[0])
    return heads


def _axis_or_axes(axes: Axes) -> int | Axes:
    if len(axes) == 1:
        return axes[0]
    return axes


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
    tree = _Tree(params)
    sides = {a: _sides(a, tree) for a in tree.arrays if a not in tree.others}
    votes = _vote(tree, sides)

    def find(array):
        if array in tree.others:
            return None, tree.others[array], False
        if (found := sides[array]) is None:
            return None, "nothing tells", True
        first, second, why = found
        out_first = _out_first(array, found)
        if out_first is None:
            ballot = votes[array.names[-1]] or [array.is_torch_weight]
            out_first = 2 * sum(ballot) > len(ballot)
        if out_first:
            first, second, why = second, first, f"{why}; (out, in)"
        if array.layers is not None:
            why = f"{why}; layers on axis {array.layers}"
        return DimensionNumbers(*map(_axis_or_axes, (first, second))), why, False

    return [Finding(array.path, array.shape, *find(array)) for array in tree.arrays]


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
    * what has more than two axes that nothing tells apart, with a warning.

    All else are matrices from the first axis to the last, or from the last to the first
    where biases tell so or the parameter is an attribute `weight`, as of Equinox. Of
    three axes and more, these are told apart:

    * layers on the first axis, or on the second as in MaxText, by the norms' scales,
    * stacks such as experts, by their biases or a transpose beside them,
    * heads, which count as one side together with their dimension, by a bias, a norm's
      width or the query beside them.

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
    known = [names for names, _ in _paths.leaves_with_names(params)]
    chosen = {}
    for part, numbers in (given or {}).items():
        found = ["/".join(names) for names in known if _paths.lies_in(names, [part])]
        if not found:
            raise ValueError(
                f"given names {part!r}, and no parameter has it in its path. Give a "
                "part of a path as curvadion_jax.describe_partition(params) prints it."
            )
        chosen |= dict.fromkeys(found, numbers)
    return _replace(params, chosen)


def equinox(params: Any) -> Any:
    """The default rule, but with Equinox's modules by their classes.

    A `weight` of `equinox.nn` is (fan_out, fan_in), also if a module of another library
    wraps it. Weights of norms, embeddings and convolutions are no matrices.

    Args:
      params: a model, or a tree with models in it, such as `eqx.filter` returns.

    Returns:
      A tree of the same structure, with dimension numbers or None.
    """
    weights = [key.name for key in _TORCH_WEIGHTS]

    def holds_weights(node):
        modules = [base.__module__.partition(".")[0] for base in type(node).__mro__]
        return "equinox" in modules and any(hasattr(node, name) for name in weights)

    chosen = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=holds_weights):
        if not holds_weights(node):
            continue
        kind = " ".join(base.__name__ for base in type(node).__mro__)
        for names, leaf in _paths.leaves_with_names(node):
            # Other weights of more than two axes are convolutions.
            is_matrix = leaf.ndim == 2 or (leaf.ndim > 2 and "Linear" in kind)
            if re.search("Norm|Embedding", kind) or names[0] not in weights:
                is_matrix = False
            numbers = DimensionNumbers(-1, -2) if is_matrix else None
            chosen["/".join((*_paths.names_of(path), *names))] = numbers
    return _replace(params, chosen)


def haliax(params: Any) -> Any:
    """The default rule, but with Haliax's `Linear` by its named axes `In` and `Out`.

    Args:
      params: a model, or a tree with models in it, such as Levanter's.

    Returns:
      A tree of the same structure, with dimension numbers or None.
    """

    def is_linear(node):
        weight = getattr(node, "weight", None)
        return hasattr(weight, "axes") and hasattr(node, "In") and hasattr(node, "Out")

    def places(axes, of):
        several = axes if isinstance(axes, tuple | list) else (axes,)
        return tuple(of.index(axis) for axis in several)

    chosen = {}
    for path, node in jax.tree.leaves_with_path(params, is_leaf=is_linear):
        if is_linear(node):
            axes = node.weight.axes
            numbers = DimensionNumbers(places(node.In, axes), places(node.Out, axes))
            for names, _ in _paths.leaves_with_names(node):
                of_weight = names[0] == "weight"
                name = "/".join((*_paths.names_of(path), *names))
                chosen[name] = numbers if of_weight else None
    return _replace(params, chosen)


def _replace(params: Any, chosen: Mapping[str, DimensionNumbers | None]) -> Any:
    """A tree of the default rule's dimension numbers, but for the chosen, by path."""
    findings = explain(params)
    warn(findings, chosen)
    return jax.tree.unflatten(
        jax.tree.structure(params),
        [chosen.get(found.path, found.numbers) for found in findings],
    )


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
        stacklevel=4,
    )
