"""How the arrays of one replica lie on its devices.

Inside a step nobody can see it: axes inside a replica are automatic, and the compiler
divides the work. That is what matrix products and arithmetic by elements want. What
cuts an array into blocks wants it otherwise: the compiler would first gather the array
on every device. So `replicas.step`, which sees how the state lies, notes it while the
step is traced; the optimizer takes the note once (`current`), and hands it down.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from curvadion_jax import _paths


class Placed(NamedTuple):
    """An array of the state: its path, its shape in one replica, and how it lies."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec


_NOTHING_KNOWN = (
    "a sync of replicas of several devices cannot see how the state is divided between "
    "them: every device gathers whole arrays and sends all of them. Call the function "
    "that curvadion_jax.replicas.step returns with arrays on its mesh (or "
    "jax.ShapeDtypeStruct with a sharding), before any other trace of the same jitted "
    "functions in it"
)

MadeOf = tuple[tuple[int, ...], Sequence[tuple[int, ...]]]
"""Shape of a parameter, and for every axis of an array made of it the parameter's axes
that it is made of."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays of a replica are divided over its devices, as far as it is known.

    Attributes:
      axes: mesh axes inside the replica, of several devices, and their sizes; empty for
        a replica of one device.
      placed: arrays whose place is known.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    placed: tuple[Placed, ...] = ()

    def specs(self, tree: Any, *, by_shape: bool) -> list[PartitionSpec | None]:
        """How the arrays of a tree like the parameters are divided, leaf by leaf.

        As an array of the state whose path ends with the leaf's, of the same shape;
        else with `by_shape` as any of that shape; None where that is not known.
        """
        found = []
        for path, leaf in _paths.leaves_with_path(tree):
            spec = self._by_path(path, leaf.shape)
            if spec is None and by_shape:
                alike = (x.spec for x in self.placed if x.shape == leaf.shape)
                spec = next(alike, None)
            found.append(None if spec is None else _over(spec, self.axes))
        return found

    def of_factors(
        self, factors: Mapping[str, jax.Array], made_of: Mapping[str, MadeOf]
    ) -> "Layout":
        """The layout of arrays made of parameters, by the parameters' paths."""
        if not self.axes:
            return self
        known = []
        for path, x in factors.items():
            shape, axes = made_of[path]
            if (spec := self._by_path(path, shape)) is not None:
                by_axis = (*spec, *[None] * (len(shape) - len(spec)))
                spec = PartitionSpec(*of_axes(by_axis, axes))
                known.append(Placed(path, x.shape, spec))
        return dataclasses.replace(self, placed=(*known, *self.placed))

    def keep_whole(self, factor: jax.Array) -> jax.Array:
        """A factor [..., r] with r whole on every device.

        With factors divided along r, by an axis that divides the matrix, the compiler
        gathers the matrix for their product, or adds up products of its size.
        """
        if not self.axes:
            return factor
        others = [PartitionSpec.UNCONSTRAINED] * (factor.ndim - 1)
        return lax.with_sharding_constraint(factor, PartitionSpec(*others, None))

    def check_known(self) -> None:
        """Warns where no array's place is known."""
        if self.axes and not self.placed:
            warnings.warn(_NOTHING_KNOWN, stacklevel=2)

    def _by_path(self, path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        for each in self.placed:
            if each.shape == shape and f"/{each.path}".endswith(f"/{path}"):
                return each.spec
        return None


ONE_DEVICE = Layout()

_noted: contextvars.ContextVar[tuple[Placed, ...]] = contextvars.ContextVar(
    "noted", default=()
)


@contextlib.contextmanager
def noting(arrays: Sequence[Placed]) -> Iterator[None]:
    """Lets `current` know these arrays."""
    token = _noted.set(tuple(arrays))
    try:
        yield
    finally:
        _noted.reset(token)


def current() -> Layout:
    """The layout where this is traced: inner axes of the mesh, and what was noted."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ONE_DEVICE
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto = [axis for axis, kind in types if kind == AxisType.Auto]
    axes = {axis: mesh.shape[axis] for axis in auto if mesh.shape[axis] > 1}
    return Layout(axes, _noted.get()) if axes else ONE_DEVICE


def _over(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """What of a division is over these axes."""

    def kept(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in axes)
        return (names[0] if len(names) == 1 else names) or None

    return PartitionSpec(*map(kept, spec))


def named_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that divide an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def of_axes(by_axis: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """What holds for the parameter's axes, for axes that are made of those.

    Of several axes the first may be divided, and none behind it.
    """
    return [
        None if not of or any(by_axis[axis] for axis in of[1:]) else by_axis[of[0]]
        for of in axes
    ]
