"""Functions of one replica, run on all of them.

What differs between replicas has a leading axis of replicas, ``[R, ...]`` (*rows*);
what is the same for all has no such axis (*common*). `over` runs a function of one
replica on every row. It is the only place where the package enters a `jax.shard_map`
over the replica axis.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _trees

AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Replicas that share one device; see :func:`curvadion_jax.replicas.simulated`."""

    replicas: int


Replicas = Mesh | Simulated | None
"""Where replicas live: on a mesh, on one device, or a single one without an axis."""


def count(mesh: Replicas) -> int:
    """The number of replicas."""
    if mesh is None:
        return 1
    return mesh.replicas if isinstance(mesh, Simulated) else mesh.shape[AXIS]


def axis_name(mesh: Replicas) -> str | None:
    """The name of the replica axis inside `over`; None if there is no axis."""
    return None if mesh is None else AXIS


def inner_axes(mesh: Replicas) -> dict[str, int]:
    """The axes inside a replica that have several devices, and their sizes."""
    if not isinstance(mesh, Mesh):
        return {}
    return {name: n for name, n in mesh.shape.items() if name != AXIS and n > 1}


def explicit_axes(mesh: Replicas) -> tuple[str, ...]:
    """The axes that are a part of an array's type, those of one device too."""
    if not isinstance(mesh, Mesh):
        return ()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def check_mesh(mesh: Any) -> None:
    """Rejects what is no mesh, or one whose replica axis is missing or Explicit."""
    if mesh is None or isinstance(mesh, Simulated):
        return
    if not isinstance(mesh, Mesh):
        hint = ""
        if callable(mesh):  # Optax takes a mesh, which can be called, for a schedule.
            hint = " With optax.inject_hyperparams, pass static_args=('mesh',)."
        raise TypeError(
            f"mesh must be what replicas.make_mesh or replicas.simulated returns, or "
            f"None for one replica, got {mesh!r:.80}.{hint}"
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    # JAX cannot take one replica, x[0], of an Explicit axis.
    if types.get(AXIS) != AxisType.Auto:
        raise ValueError(
            f"The mesh needs an axis {AXIS!r} of type Auto, and has {types}. Make it "
            "with replicas.make_mesh."
        )


def known_sharding(x: Any) -> NamedSharding | None:
    """How an array lies on a mesh; a traced one does not tell."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def has_rows(x: Any) -> bool:
    """Whether an array lies divided over the replicas of a mesh, as far as is known."""
    sharding = known_sharding(x)
    return sharding is not None and AXIS in named_axes(sharding.spec[:1])


def named_axes(spec: P) -> frozenset[str]:
    """The mesh axes that shard an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def check_rows(tree: Any, mesh: Replicas, what: str) -> None:
    """Rejects arrays without a row for each replica, and rows without a mesh."""
    replicas = count(mesh)
    for path, x in jax.tree.leaves_with_path(tree):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if not isinstance(mesh, Mesh) and has_rows(x):
            raise ValueError(
                f"{name} has a row on the devices of each of {x.shape[0]} replicas, "
                f"and the optimizer has mesh={mesh}. Give it the mesh that you gave to "
                "replicas.replicate."
            )
        if mesh is not None and jnp.shape(x)[:1] != (replicas,):
            advice = (
                "Copy parameters with replicas.replicate, split a batch with "
                "replicas.split, pass what is common by keyword, and give a state of "
                "another number of replicas to replicas.resize."
            )
            if what == "State":
                advice = (
                    "Set a hyperparameter for each replica, jnp.full(replicas, value), "
                    "and give a state of another number of them to replicas.resize."
                )
            elif _trees.may_be_key(x):
                advice = "Give every replica a key: jax.random.split(key, replicas)."
            elif not hasattr(x, "shape"):
                advice = (
                    "It is no array: close over it, or keep it out of the tree, as "
                    "eqx.partition(model, eqx.is_array) does."
                )
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}, and needs a row for each of "
                f"{replicas} replicas, ({replicas}, ...). {advice}"
            )


def look_like_rows(tree: Any, mesh: Replicas) -> bool:
    """Whether all leaves of a tree are arrays that could be rows."""
    replicas = count(mesh)
    leaves = jax.tree.leaves(tree)  # of a closure they are also meshes, or models

    def is_row(x):
        return isinstance(x, jax.Array | np.ndarray) and x.shape[:1] == (replicas,)

    return replicas > 1 and bool(leaves) and all(map(is_row, leaves))


def check_common(arguments: dict[str, Any], mesh: Replicas) -> None:
    """Rejects rows where every replica is given the whole array.

    It warns of random keys, and where arrays look like rows and nobody knows.
    """
    for name, argument in arguments.items():
        if any(has_rows(x) for x in jax.tree.leaves(argument)):
            raise ValueError(
                f"Argument {name!r} has a row for each replica, and every replica is "
                "given all rows. Pass rows to replicas.map by position, name them to "
                "replicas.lift with rows=[...], and give an optimizer what is the same "
                "for all replicas, such as the mean of a loss."
            )
        if count(mesh) > 1 and any(map(_trees.may_be_key, jax.tree.leaves(argument))):
            warnings.warn(
                f"Argument {name!r} has a random key, with which all replicas draw the "
                "same numbers, as of dropout. Pass jax.random.split(key, replicas) by "
                "position.",
                stacklevel=3,
            )
        elif look_like_rows(argument, mesh):
            shape = jnp.shape(jax.tree.leaves(argument)[0])
            warnings.warn(
                f"Argument {name!r} has shape {shape}, and every replica is given all "
                f"of it. If it is a row for each of {count(mesh)} replicas, pass it to "
                "replicas.map by position, or name it to replicas.lift with "
                "rows=[...].",
                stacklevel=3,
            )


def over(
    function: Callable[[Any, Any], tuple[Any, Any]], mesh: Replicas
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Runs ``function(row, common) -> (row, common)`` on the rows of all replicas.

    Inside, `AXIS` is the axis that collectives communicate over. Nothing checks that
    what is returned as common is the same on all replicas: it must be made of common
    arguments and of the results of collectives.
    """
    if mesh is None:
        return function
    if isinstance(mesh, Simulated):
        return _simulate(function, mesh.replicas)

    def of_one(rows, common):
        row, common = function(jax.tree.map(lambda x: x[0], rows), common)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], row), common

    mapped = jax.shard_map(
        of_one,
        mesh=automatic(mesh),
        in_specs=(P(AXIS), P()),
        out_specs=(P(AXIS), P()),
        axis_names={AXIS},
        # Types that say what differs would refuse scans with a constant carry and
        # constraints over the whole mesh, and none is needed: rows differ.
        check_vma=False,
    )
    return jax.jit(mapped)  # shard_map over some of the axes needs a trace


def _simulate(function, replicas: int):
    mapped = jax.vmap(function, (0, None), axis_name=AXIS, axis_size=replicas)

    def run(rows, common):
        rows, common = mapped(rows, common)
        return rows, jax.tree.map(lambda x: x[0], common)

    return run


def automatic(mesh: Mesh) -> Any:
    """The mesh with automatic axes inside a replica, where they are Explicit.

    At the boundary of a `shard_map` over another axis JAX gathers what is sharded over
    Explicit axes, so the optimizer's update sees automatic ones.
    """
    if not explicit_axes(mesh):
        return mesh
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto)
    return mesh.abstract_mesh.update_axis_types(types)
