"""The short rule, without a loss: it takes what is certain, and asks about the rest.

Names and shapes rarely tell what an array is. Two names do: the `kernel` of a dense
layer of Flax, and the `w` of Haiku if the bias next to it tells its outputs.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any

from curvadion_jax import _trees
from curvadion_jax.dimension_numbers._partition import (
    DimensionNumbers,
    Finding,
    Partition,
    warn,
)

_BIASES = {"kernel": "bias", "w": "b"}  # Flax's and Haiku's
_TABLES = ("embedding", "embeddings")  # of `nn.Embed` and `hk.Embed`
# A module with one of these in its path may be a table, a norm, a convolution or an
# output head.
_TELLING = re.compile(
    "table|emb|tok|vocab|pos(?!t)|quant|codebook|norm|ln|rms|scale|conv|head|logit|class"
    "|predict|score|readout|output|final",
    re.IGNORECASE,
)
# Such a long side may be a vocabulary, such a short one classes, or raw inputs.
_LONGEST = 8
LINE = "dimension_numbers=cd.dimension_numbers.from_loss(loss_fn, params, batch)"

Shapes = dict[str, tuple[int, ...]]


def by_name(params: Any) -> Partition:
    """Finds the matrices that cannot be mistaken, by name and shape.

    This is what ``dimension_numbers=None`` means. Prefer :func:`from_loss`, which
    answers most of what this rule asks about.

    A matrix is a `kernel` of two axes, (fan_in, fan_out) as in Flax, or a `w` of Haiku
    whose bias has the length of its outputs alone. The rule asks about it if its path
    may belong to a table, norm, convolution or head, if a side may be a vocabulary, or
    if it may be a stack of vectors.

    Args:
      params: any tree of arrays or abstract values.

    Returns:
      A :class:`Partition`. The other optimizer trains what is asked about.

    Raises:
      TypeError: if a parameter is no array.

    Warns:
      PartitionWarning: if there are parameters that are asked about.

    Example:
      >>> from jax.numpy import ones
      >>> params = {"up": {"kernel": ones((4, 8)), "bias": ones(8)}}
      >>> print(by_name(params))
      parameter  shape   kind    matrices  fan_in  fan_out  why
      up/bias    (8,)    vector                             at most one axis
      up/kernel  (4, 8)  matrix  1         4       8        a kernel, by its name
    """
    partition = find(params)
    warn(partition.findings, LINE)
    return partition


def find(params: Any) -> Partition:
    """As `by_name`, without a warning."""
    _trees.check_arrays(params)
    shapes = {path: tuple(x.shape) for path, x in _trees.leaves_with_path(params)}
    kernels = _kernels(shapes)

    def of_one(path: str, shape: tuple[int, ...]) -> Finding:
        if math.prod(shape) == 0 or sum(size > 1 for size in shape) < 2:
            return Finding(path, shape, "vector", None, "at most one axis")
        if len(shape) == 2 and path.rpartition("/")[2] in _TABLES:
            return Finding(path, shape, "table", None, "an embedding, by its name")
        if path in kernels:
            numbers = DimensionNumbers(0, 1)
            return Finding(path, shape, "matrix", numbers, "a kernel, by its name")
        return Finding(path, shape, "asked", None, "name and shape do not tell")

    return Partition(tuple(of_one(*each) for each in shapes.items()))


def _kernels(shapes: Shapes) -> set[str]:
    """The paths of what is a dense layer's kernel beyond doubt, and no output head."""
    found, turned = set(), set()
    for path, shape in shapes.items():
        module, slash, name = path.rpartition("/")
        if name not in _BIASES or len(shape) != 2:
            continue
        bias = shapes.get(f"{module}{slash}{_BIASES[name]}")
        if bias not in (None, shape[1:]):
            turned.add(name)
        # A `w` of somebody's own may be (fan_out, fan_in).
        is_certain = name == "kernel" or (bias and shape[0] != shape[1])
        is_long = max(shape) > _LONGEST * min(shape)
        if is_certain and not (is_long or _TELLING.search(module)):
            found.add(path)
    embeddings = [size for path, size in shapes.items() if "emb" in path.lower()]
    vocabularies = {size[:1] for size in embeddings if len(size) == 2}
    stacked = _stacked(shapes)
    return {
        path
        for path in found
        # One of the other order, as in Hugging Face's GPT-2, makes all doubtful.
        if path.rpartition("/")[2] not in turned
        and shapes[path][1:] not in vocabularies
        and stacked.isdisjoint(_modules(path))
    }


def _stacked(shapes: Shapes) -> set[str]:
    """Modules that may be stacked as under a scan, so that a vector has two axes.

    All of their arrays are as long on one axis, and one array has three axes or more.
    """
    inside = collections.defaultdict(list)
    for path, shape in shapes.items():
        for module in _modules(path):
            inside[module].append(shape)
    lengths = lambda arrays, axis: {shape[axis : axis + 1] for shape in arrays}
    return {
        module
        for module, arrays in inside.items()
        if max(map(len, arrays)) > 2
        and any(len(lengths(arrays, axis)) == 1 for axis in (0, 1))
    }


def _modules(path: str) -> list[str]:
    """`a/b/kernel` -> `/`, `/a/`, `/a/b/`."""
    names = path.split("/")[:-1]
    return ["/".join(["", *names[:depth], ""]) for depth in range(len(names) + 1)]
