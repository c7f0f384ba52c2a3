"""How the parameters of one replica are sharded over its devices.

Inside a replica axes are automatic: the compiler divides the work. That suits matrix
products and elementwise arithmetic, but it would gather a matrix for an orthonormal
basis, and an array that is cut into blocks of codes. So those places are told how each
parameter is sharded, by its path.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _trees
from curvadion_jax._matrix_view import MadeOf
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._rows import AXIS, Replicas


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of named arrays over the devices of a replica.

    Attributes:
      axes: sizes of the mesh axes inside the replica; empty for one device.
      specs: the sharding of each parameter over these axes, by its path.
      replicas: the number of replicas, which the bytes of a sync may depend on.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    specs: Mapping[str, P] = dataclasses.field(default_factory=dict)
    replicas: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether a replica has several devices."""
        return bool(self.axes)

    @property
    def devices(self) -> int:
        """Number of devices of a replica."""
        return math.prod(self.axes.values())

    def of(self, tree: Any) -> list[P]:
        """The sharding of each array of a tree with paths of parameters."""
        return [self.specs.get(path, P()) for path, _ in _trees.leaves_with_path(tree)]

    def of_factors(self, made_of: Mapping[str, MadeOf]) -> "Layout":
        """The layout of factors of matrices, by the paths of their parameters."""
        specs = {
            path: P(*of_axes(self.specs.get(path, P()), axes))
            for path, axes in made_of.items()
        }
        return dataclasses.replace(self, specs=specs)

    def place(self, tree: Any) -> Any:
        """Shards the arrays of a tree with paths of parameters as `of` says.

        Where arrays of one shape are sharded otherwise, the compiler for TPUs may let
        one decide for all, and would gather both operands of their sum.
        """
        if not self.is_divided:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        place = lax.with_sharding_constraint
        return structure.unflatten(map(place, leaves, self.of(tree)))

    def keep_whole(self, factor: jax.Array) -> jax.Array:
        """Leaves a factor [..., r] unsharded along r.

        Else, over an axis that also shards the matrix, the compiler would gather the
        matrix for their product, or add up products of its size.
        """
        if not self.is_divided:
            return factor
        others = [P.UNCONSTRAINED] * (factor.ndim - 1)
        return lax.with_sharding_constraint(factor, P(*others, None))


ONE_DEVICE = Layout()


def make_layout(mesh: Replicas, specs: Any, params: Any) -> Layout:
    """The layout of a replica's parameters.

    Args:
      mesh: where the replicas live.
      specs: tree of `PartitionSpec` of one replica's parameters, or a prefix of it.
        None takes those of Explicit axes from the types of the parameters.
      params: the parameters, as rows.

    Raises:
      ValueError: if a replica has several devices, and nothing tells how its
        parameters lie on them, or `specs` is no tree of them.
    """
    axes = _rows.inner_axes(mesh)
    if not axes:
        return Layout(replicas=_rows.count(mesh))
    if specs is None:
        if not set(axes) <= set(_rows.explicit_axes(mesh)):
            raise ValueError(
                f"A replica has several devices, {axes}, and nothing says how its "
                "parameters are sharded over them. Pass specs=: PartitionSpec() if "
                "each device holds all of them, or a tree of PartitionSpec of one "
                "replica's parameters, such as jax.tree.map(lambda x: x.sharding.spec, "
                "params) before replicas.replicate."
            )
        specs = jax.tree.map(lambda x: P(*jax.typeof(x).sharding.spec[1:]), params)
    leaves = _of_every_leaf(specs, params)
    found = {}
    pairs = zip(_trees.leaves_with_path(params), leaves, strict=True)
    for (path, rows), spec in pairs:
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        _check_spec(path, spec, rows.shape[1:], mesh)
        found[path] = _within(spec, axes)
    return Layout(axes, found, _rows.count(mesh))


def _of_every_leaf(specs: Any, params: Any) -> list[Any]:
    """The spec of each leaf; one may stand for a whole subtree."""
    leaves = []
    try:
        jax.tree.map(
            lambda spec, tree: leaves.extend([spec] * len(jax.tree.leaves(tree))),
            specs,
            params,
            is_leaf=lambda x: isinstance(x, P | NamedSharding),
        )
    except ValueError as error:
        raise ValueError(
            f"specs is not a tree, or a prefix, of the parameters: {error} Give a "
            "PartitionSpec for each parameter; those of an nnx state are "
            "nnx.as_pure(nnx.get_partition_spec(state))."
        ) from error
    return leaves


def _check_spec(path: str, spec: P, shape: tuple[int, ...], mesh: Any) -> None:
    """Rejects axes that the mesh or the parameter lacks, and the specs of rows."""
    # Rules of a whole mesh may name the replicas behind another axis.
    unknown = _rows.named_axes(spec) - {*mesh.axis_names, P.UNCONSTRAINED}
    if unknown or tuple(spec)[:1] == (AXIS,):
        raise ValueError(
            f"specs has {spec} for {path}. Give the PartitionSpec of one replica's "
            "parameter, as before replicas.replicate, over the axes inside a replica: "
            f"{[name for name in mesh.axis_names if name != AXIS]}."
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"specs has {spec} for {path}, of more axes than its shape {shape}. Give "
            "at most one entry for each axis of one replica's parameter."
        )


def _within(spec: P, axes: Mapping[str, int]) -> P:
    """Leaves out all mesh axes but these."""

    def kept(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if name in axes)
        return (names[0] if len(names) == 1 else names) or None

    return P(*[kept(entry) for entry in spec])


def of_axes(spec: P, axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The sharding of an array that merges a parameter's axes, as far as it is known.

    Of several axes that are merged only the first may be sharded.
    """
    known = dict(enumerate(spec))
    entries = []
    for merged in axes:
        is_known = bool(merged) and not any(known.get(axis) for axis in merged[1:])
        entries.append(known.get(merged[0]) if is_known else None)
    return entries
