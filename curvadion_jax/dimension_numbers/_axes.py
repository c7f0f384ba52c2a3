"""Where the axes of a parameter lie within a value that is made of it.

An axis of a value is a product of *atoms*, the slowest one first. A parameter of shape
[D, heads, size] is a value with one atom on each axis: ((0, D),), ((1, heads),) and
((2, size),). Reshaped to [D, heads * size] its second axis has two atoms, ((1, heads),
(2, size)). Transpositions, reshapes and slices are functions of the atoms alone.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REPEATED, BESIDE = -1, -2


class Atom(NamedTuple):
    """A factor of an axis of a value.

    Attributes:
      axis: the parameter's axis; or `REPEATED` if the value is the same all along it,
        and `BESIDE` if several values lie side by side.
      size: its length; None if a part of the axis is missing, or lies beside other
        values.
    """

    axis: int
    size: int | None


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]
"""The atoms of each axis of a value. An axis of length 1 has none."""
Shape = Sequence[int]
Axes = frozenset[int]
"""Some axes of a parameter."""
NONE: Axes = frozenset()


def of_parameter(shape: Shape) -> Dims:
    """The dims of a value that is the parameter itself."""
    return tuple((Atom(d, n),) if n > 1 else () for d, n in enumerate(shape))


def repeated(size: int) -> Dim:
    """An axis along which a value is repeated."""
    return () if size == 1 else (Atom(REPEATED, size),)


def axes_at(dims: Dims, places: Iterable[int]) -> Axes:
    """The parameter's axes at these axes of the value."""
    atoms = (atom for d in places for atom in dims[d])
    return frozenset(atom.axis for atom in atoms if atom.axis >= 0)


def is_repeated(dim: Dim) -> bool:
    """Whether the value is the same all along an axis longer than 1."""
    return bool(dim) and all(atom.axis == REPEATED for atom in dim)


def cut(dim: Dim) -> Dim:
    """An axis of which a part is left, or that other values lie beside."""
    # Each axis once: in a loop the atoms would become more with every pass.
    return tuple(dict.fromkeys(Atom(atom.axis, None) for atom in dim))


def resized(dims: Dims, old: Shape, new: Shape) -> Dims:
    """After a slice or a padding, or among devices that have a part each."""

    def change(dim, before, after):
        if before == after:
            return dim
        if is_repeated(dim):
            return repeated(after)
        return () if after == 1 else cut(dim)

    return tuple(map(change, dims, old, new))


def broadcast(dims: Dims, old: Shape, new: Shape, places: Sequence[int]) -> Dims:
    """After `broadcast_in_dim`, which puts axis i of the value at `places[i]`."""
    result = [repeated(n) for n in new]
    for d, place in enumerate(places):
        if old[d] == new[place]:
            result[place] = dims[d]
    return tuple(result)


def reshaped(dims: Dims, old: Shape, new: Shape) -> Dims:
    """After a reshape.

    From the first axis on, the shortest runs of old and new axes that have the same
    number of elements correspond: [6, 4] -> [2, 3, 4] has [6] -> [2, 3], [4] -> [4].
    """
    result: list[Dim] = [()] * len(new)
    if 0 in old:
        return tuple(result)
    before = [d for d, n in enumerate(old) if n != 1]
    after = [d for d, n in enumerate(new) if n != 1]
    while before and after:
        merged, split = [before.pop(0)], [after.pop(0)]
        while (given := _size(old, merged)) != (wanted := _size(new, split)):
            if given < wanted:
                merged.append(before.pop(0))
            else:
                split.append(after.pop(0))
        atoms = [atom for d in merged for atom in dims[d]]
        for d, dim in zip(split, _divided(atoms, [new[d] for d in split]), strict=True):
            result[d] = dim
    return tuple(result)


def torn(before: Dims, after: Dims) -> Axes:
    """The parameter's axes that a reshape has spread over axes of repetitions."""

    def having(dims, axis):
        return [dim for dim in dims if axis in [atom.axis for atom in dim]]

    result = set()
    for axis in axes_at(after, range(len(after))):
        spread = having(after, axis)
        if len(spread) > len(having(before, axis)) and having(spread, REPEATED):
            result.add(axis)
    return frozenset(result)


def _size(shape: Shape, places: Iterable[int]) -> int:
    return math.prod(shape[d] for d in places)


def _divided(atoms: list[Atom], sizes: list[int]) -> list[Dim]:
    """Divides atoms among axes of these sizes, the first atoms to the first axis.

    An atom may be split. If they do not divide evenly, or a size is not known, every
    axis may have a part of each.
    """
    if len(sizes) == 1:
        return [tuple(atoms)]
    anywhere = [cut(tuple(atoms))] * len(sizes)
    rest, result = list(atoms), []
    for size in sizes:
        dim = []
        while size > 1:
            atom = rest.pop(0)
            if atom.size is None:
                return anywhere
            if size % atom.size == 0:
                dim.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                dim.append(Atom(atom.axis, size))
                rest.insert(0, Atom(atom.axis, atom.size // size))
                size = 1
            else:
                return anywhere
        result.append(tuple(dim))
    return result
