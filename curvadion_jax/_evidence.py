"""What the parameters of a tree say of each other: biases, norms, layers, neighbours.

`dimension_numbers.py` has the rule that goes by it, and the names of tables and heads.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from curvadion_jax import _trees

Axes = tuple[int, ...]
Sizes = tuple[int, ...]
Shape = tuple[int, ...]
Names = tuple[str, ...]

# Names are in lower case; each pattern has to match a whole name.
LAYER_NORM = r"(.*_)?(ln|layer_?norm|rms_?norm)(_?\w)?"
NORM = rf"{LAYER_NORM}|.*norm(_?\w)?|rms"
SCALE = r"(.*_)?(scale|gamma)|gamma_.*"
WEIGHT = r"kernels?|weights?|w"
QUERY = r"(w_?|to_)?(q|k|v|kv|qkv|query|key|value)(_?proj(ection)?|_kernel|_w|_b)?"
_BIASES = ("bias", "biases", "b")
# Of a matrix, and of no table: its name says what it does in its module.
PROJECTION = (
    r"w_?(\d|q|k|v|o|i|u|d|g|qkv|kv|in|out|up|down|gate)(_?\d)?"
    r"|(q|k|v|o|qkv|kv|query|key|value|out|up|down|gate)_?proj(ection)?"
)
# LoRA's factors: lora_a and lora_b, lora/A and lora/B, lora_A.weight.
_FACTOR = re.compile(r"(lora[._/]?)([ab])(?![a-z])", re.IGNORECASE)
_OTHER_FACTOR = str.maketrans("abAB", "baBA")
# Attributes of Equinox's and other modules in PyTorch's order, (out, in).
TORCH_WEIGHTS = ("weight", "weight_ih", "weight_hh")


@dataclasses.dataclass(eq=False)
class Array:
    """A parameter, and what the parameters around it say of it.

    Attributes:
      path: such as 'layers/0/attention/kernel'.
      module: the path without the last name, such as 'layers/0/attention/'.
      names: along the path, as they are written.
      shape: of the parameter.
      is_torch_weight: whether it is in an attribute `weight` of an object.
      layers: the axis of a scan over layers; two of a scan within a scan.
      bias: of a kernel.
      is_bias: whether it is one.
      partner: of a factor of LoRA, the other one; also of what may be one, `A` and `B`.
      is_kernel_of_norm: whether it is the scale of a norm, named `kernel`.
    """

    path: str
    module: str
    names: Names
    shape: Shape
    is_torch_weight: bool
    layers: Axes = ()
    bias: "Array | None" = None
    is_bias: bool = False
    partner: "Array | None" = None
    is_kernel_of_norm: bool = False

    @functools.cached_property
    def words(self) -> list[str]:
        """The names that say something, in lower case."""
        said = [n.lower() for n in self.names if not n.isdigit() and n != "layers"]
        return [name.removesuffix("_stacked") for name in said]

    def matches(self, pattern: str, *places: int) -> bool:
        """Whether a whole name matches, at one of these places from the end."""
        found = [self.words[-place] for place in places if place <= len(self.words)]
        return any(re.fullmatch(pattern, word) for word in found)

    @functools.cached_property
    def is_scale(self) -> bool:
        """Whether it is the scale of a norm, by its name."""
        of_norm = self.matches("weights?|w|g", 1) and self.matches(f"{NORM}|scale", 2)
        return self.matches(SCALE, 1) or of_norm or self.is_kernel_of_norm

    @functools.cached_property
    def is_query(self) -> bool:
        """Whether it is a projection to queries, keys or values, by its name."""
        return self.matches(QUERY, 1, 2)

    @functools.cached_property
    def is_projection(self) -> bool:
        """Whether it is a projection, whatever the module's name."""
        return self.matches(PROJECTION, 1)

    @functools.cached_property
    def is_lora(self) -> bool:
        return bool(_FACTOR.search(self.path))

    @functools.cached_property
    def axes(self) -> Axes:
        """The axes of one layer that are longer than 1."""
        axes = enumerate(self.shape)
        return tuple(axis for axis, n in axes if n != 1 and axis not in self.layers)

    @property
    def rank(self) -> int:
        """The number of axes of one layer, those of length 1 too."""
        return len(self.shape) - len(self.layers)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The lengths of these axes."""
        return tuple(self.shape[axis] for axis in self.axes)


class Tree:
    """All parameters.

    Attributes:
      arrays: in the order of the leaves.
      widths: lengths of the norms' scales; the model's width is one.
    """

    def __init__(self, params: Any):
        self.arrays: list[Array] = []
        self._below: dict[Names, list[Array]] = collections.defaultdict(list)
        keys = [path for path, _ in jax.tree.leaves_with_path(params)]
        leaves = _trees.leaves_with_names(params)
        attributes = [jax.tree_util.GetAttrKey(name) for name in TORCH_WEIGHTS]
        for path, (names, leaf) in zip(keys, leaves, strict=True):
            name = "/".join(names)
            # An object's only array may have no name, as of Haliax's named arrays.
            unnamed = path[-1:] == (jax.tree_util.FlattenedIndexKey(0),)
            place = name.removesuffix("/0") if unnamed else name
            is_torch_weight = any(key in path for key in attributes)
            array = Array(name, *_split(place), leaf.shape, is_torch_weight)
            self.arrays.append(array)
            for depth in range(len(array.names)):
                self._below[array.names[:depth]].append(array)
        self._is_ensemble = self._all_share_an_axis()
        self._within = functools.cache(self._arrays_within)
        self._near = functools.cache(self._scan_within)
        for array in self.arrays:
            array.is_kernel_of_norm = self._is_kernel_of_norm(array)
        for array in self.arrays:
            array.layers = self._layers_axes(array)
        self._find_factors()
        self._find_biases()
        scales = [array for array in self.arrays if array.is_scale]
        self.widths = {array.sizes[-1] for array in scales if array.sizes}

    def _is_kernel_of_norm(self, array: Array) -> bool:
        """Whether a module that is named after a norm has it alone, and as a vector.

        Or a stack of vectors, beside stacks of matrices: else it may be a Dense's.
        """
        is_named = array.matches("kernel", 1) and array.matches(NORM, 2)
        is_alone = len(self._below[array.names[:-1]]) == 1
        if not (is_named and is_alone):
            return False
        if len(array.shape) != 2:
            return len(array.shape) == 1
        near = [other.shape for other in self._below[array.names[:-2]]]
        stacks = [shape for shape in near if len(shape) > 2]
        alike = [sum(s[axis] == array.shape[axis] for s in stacks) for axis in (0, 1)]
        return 2 * max(alike) > len(stacks)

    def _layers_axes(self, array: Array) -> Axes:
        """The axis of a scan over layers: 0, or 1 as in MaxText; () without a scan.

        Under a scan the scales of the nearest norms are [layers, width], or [width,
        layers]. They have the axis of the layers alike, and share it with most kernels.
        Where both axes would do, as of [layers, width, n], kernels further away decide.
        """
        if len(array.shape) < 2:
            return ()
        if self._is_of_several_models(array):
            return (0,)
        every = (self._near(array.names[:n]) for n in reversed(range(len(array.names))))
        levels = [near for near in every if near is not None]
        if not levels or not levels[0].axes:
            return ()
        nearest = levels[0]
        # Further away there may be another scan, over another number of layers.
        alike = [near.axes for near in levels if near.scales == nearest.scales]
        axis = next((axes[0] for axes in alike if len(axes) == 1), nearest.axes[0])
        lengths = {scale[axis] for scale in nearest.scales}
        if array.shape[axis] not in lengths:
            return ()
        inner = nearest.inner_scans[axis]
        is_nested = array.shape[axis + 1 : axis + 2] == (inner,)
        return (axis, axis + 1) if is_nested else (axis,)

    def _all_share_an_axis(self) -> bool:
        """Whether many arrays have a first axis of one length, which no other axis has.

        As where a model is initialised under `jax.vmap`.
        """
        shapes = [array.shape for array in self.arrays]
        firsts = {shape[:1] for shape in shapes}
        others = {(n,) for shape in shapes for n in shape[1:]}
        # (Weights and biases of layers side by side share one too: their outputs.)
        several = len(shapes) > 6 and any(len(shape) > 2 for shape in shapes)
        return several and len(firsts) == 1 and not firsts & {(), *others}

    def _is_of_several_models(self, array: Array) -> bool:
        """Whether its first axis counts models: of the whole tree, or of a `vmap`.

        Flax names a `vmap` of modules, and all in it share a first axis.
        """
        if self._is_ensemble:
            return True
        for depth, name in enumerate(array.names, 1):
            if re.fullmatch(r"Vmap\w+_\d+", name):
                inside = self._below[array.names[:depth]]
                return len({array.shape[:1] for array in inside}) == 1
        return False

    def _scan_within(self, prefix: Names) -> "_Scan | None":
        """What the scales and kernels below a name say; None without either."""
        near = self._below[prefix]
        scales = frozenset(array.shape[:2] for array in near if array.is_scale)
        kernels = [array.shape for array in near if len(array.shape) > 2]
        if not (scales and kernels):
            return None
        whole = [array.shape for array in near if array.is_scale]
        inner = {axis: _inner_scan(axis, whole, kernels) for axis in (0, 1)}
        return _Scan(scales, _axes_of_scan(scales, kernels), inner)

    def _find_biases(self) -> None:
        """Pairs `kernel` with `bias`, `Wi` with `bi`, `wi_0` with `wi_0_bias`."""
        # Haiku's `m/~/linear` and `m/linear` are two modules.
        by_place = {
            (array.module, array.names[-1].lower()): array for array in self.arrays
        }
        for array in self.arrays:
            # WeightNorm keeps the direction of a `weight` as `weight_v`.
            last = array.names[-1].lower().replace("weight_v", "weight")
            stem = re.sub(rf"({WEIGHT})$", "", last)
            stem = stem if stem != last else f"{last}_"
            # In a pair (kernel, bias), as of stax, names are positions.
            is_pair = last == "0" and len(self._below[array.names[:-1]]) == 2
            endings = ["1"] if is_pair else [stem + name for name in _BIASES]
            if begun := re.match(WEIGHT, last):
                rest = last[begun.end() :]
                endings += [name + rest for name in _BIASES]
            for ending in endings:
                bias = by_place.get((array.module, ending))
                if bias and bias.partner:  # `b` of LoRA's `a` and `b`
                    continue
                if bias and (last != "0" or bias.sizes == array.sizes[-1:]):
                    array.bias, bias.is_bias = bias, True

    def _find_factors(self) -> None:
        """Pairs `lora_a` with `lora_b`, and `A` or `a` with the other one by shapes."""
        by_path = {array.path: array for array in self.arrays}
        swapped = lambda found: found[1] + found[2].translate(_OTHER_FACTOR)
        for array in self.arrays:
            last = array.names[-1]
            if array.is_lora:
                array.partner = by_path.get(_FACTOR.sub(swapped, array.path))
            elif last in ("A", "a"):
                name = last.translate(_OTHER_FACTOR)
                other = by_path.get(f"{array.path[:-1]}{name}")
                if other and _are_factors(array.shape, other.shape):
                    array.partner, other.partner = other, array

    def is_hidden(self, array: Array) -> bool:
        """Whether all its sides are widths of norms."""
        return set(array.sizes) <= self.widths

    def is_in_scan(self, array: Array) -> bool:
        """Whether an array has an axis of layers, and not of models side by side.

        Of a module with norms of as many layers: the length of an array beside it may
        be the same by chance.
        """
        if not array.layers or self._is_of_several_models(array):
            return False
        modules = [array.names[:depth] for depth in range(len(array.names))]
        inner = [each for each in modules if len(self._below[each]) < len(self.arrays)]
        return any(self._near(each) is not None for each in inner)

    def leads_to_another(self, array: Array) -> bool:
        """Whether a layer's outputs are the inputs of a later one of the same name.

        As in `classifier/layers/0`, whose outputs `classifier/layers/3` takes.
        """
        if array.bias is None:
            return False
        numbers = lambda array: [int(n) for n in re.findall(r"\d+", array.path)]
        unnumbered = lambda array: re.sub(r"\d+", "", array.path)
        outputs = array.bias.shape[-1]
        for other in self.arrays:
            if other.bias is None or unnumbered(other) != unnumbered(array):
                continue
            if numbers(other) <= numbers(array):
                continue
            inputs = [*other.shape]
            if other.bias.shape[-1] in inputs:
                inputs.remove(other.bias.shape[-1])
            if outputs in inputs:
                return True
        return False

    def has_query_and_key(self, array: Array) -> bool:
        """Whether an array is a query, key or value beside others, by their names."""
        near = self._below[array.names[:-1]]
        names = {other.names[-1].lower() for other in near}
        return array.is_query and ({"query", "key"} <= names or {"q", "k"} <= names)

    def beside(self, array: Array) -> set["Neighbour"]:
        """What is in an array's module and in those next to it, the array too."""
        return self._within(array.names[:-2], len(array.names))

    def _arrays_within(self, prefix: Names, depth: int) -> set["Neighbour"]:
        near = [array for array in self._below[prefix] if len(array.names) <= depth]
        return {Neighbour(array.shape, array.sizes, array.is_query) for array in near}


class Neighbour(NamedTuple):
    """What counts of an array beside another one; many are alike."""

    shape: Shape
    sizes: Sizes
    is_query: bool


def _are_factors(a: Shape, b: Shape) -> bool:
    """Whether [*stack, m, r] and [*stack, r, n] have a product of a lower rank.

    Either may come first: PyTorch's LoRA is B A.
    """
    if len(a) != len(b) or len(a) < 2 or a[:-2] != b[:-2]:
        return False
    pairs = ((a, b), (b, a))
    return any(x[-1] == y[-2] < min(x[-2], y[-1]) for x, y in pairs)


class _Scan(NamedTuple):
    """What the scales of norms within a module say.

    Attributes:
      scales: their first two lengths.
      axes: which of these axes may be the layers'.
      inner_scans: the length of a scan inside of that axis; 0 without one.
    """

    scales: frozenset[Shape]
    axes: Axes
    inner_scans: dict[int, int]


def _inner_scan(axis: int, scales: list[Shape], kernels: list[Shape]) -> int:
    """How long the next axis is, if it is one of layers too: of all scales alike.

    And of most kernels: the scales of queries and keys may be [layers, heads, n].
    """
    lengths = {scale[axis + 1] if len(scale) > 2 else 0 for scale in scales}
    (inner, *others) = lengths
    alike = sum(kernel[axis + 1 : axis + 2] == (inner,) for kernel in kernels)
    return inner if not others and 2 * alike > len(kernels) else 0


def _axes_of_scan(scales: Collection[Shape], kernels: list[Shape]) -> Axes:
    """The axes, of 0 and 1, that scales have alike and that most kernels share.

    One axis for all of these arrays: a square kernel has the width at both.
    """
    if any(len(scale) < 2 for scale in scales):
        return ()
    found = {}
    for axis in (0, 1):
        lengths = {scale[axis] for scale in scales}
        alike = sum(kernel[axis] in lengths for kernel in kernels)
        if len(lengths) == 1 and 2 * alike > len(kernels):
            found[axis] = alike
    most = max(found.values(), default=0)
    return tuple(axis for axis, alike in found.items() if alike == most)


def _split(path: str) -> tuple[str, Names]:
    """The module and the names of a path.

    A name may be a path: Haiku's `gpt/~/embed`, `wte.weight`, a flattened tree.
    """
    path = re.sub(r"\('|', '|'\)", "/", path)
    path = re.sub(r"/(value/)?(data_)?array$", "", path)  # of Haliax and Penzai
    names = tuple(re.findall(r"[^/.~]+", path)) or ("",)
    return path[: path.rindex(names[-1])], names
