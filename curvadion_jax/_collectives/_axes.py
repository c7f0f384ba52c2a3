"""What JAX knows of an axis: whether it is there, and what differs over it."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def check_axis_name(axis_name: Any) -> None:
    """Rejects what is not one name: a tuple of them would blind the guards."""
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a string or None, got {axis_name!r}")


def axis_size(axis_name: str | None) -> int:
    """Number of replicas.

    Raises:
      ValueError: if no such axis is bound where this is called.
    """
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        bound = list(jax.sharding.get_abstract_mesh().manual_axes)
        here = f" (bound here: {', '.join(map(repr, bound))})" if bound else ""
        raise ValueError(
            f"the axis {axis_name!r} is not bound here{here}: call `update` inside "
            f"curvadion_jax.replicas.step (or a shard_map or vmap with the axis "
            f"{axis_name!r}), or pass axis_name=None for one replica"
        ) from error


def _varying(x: Any) -> frozenset[str]:
    return varying_aval(jax.typeof(x))


def varying_aval(aval: Any) -> frozenset[str]:
    return aval.manual_axis_type.varying


def axes_of(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps over which x may differ, as far as JAX tracks it."""
    return _varying(x)


def is_checked(axis_name: str | None) -> bool:
    """Whether JAX tracks here what differs over the axis (shard_map, check_vma on)."""
    if axis_name is None or not is_manual(axis_name):
        return False
    return axis_name in _varying(lax.axis_index(axis_name))


def is_manual(axis_name: str | None) -> bool:
    """Whether the axis is one of an enclosing shard_map (and not of a vmap)."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def checked_axes() -> list[str]:
    """Axes of enclosing shard_maps over which JAX tracks what differs."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return [axis for axis in manual if is_checked(axis)]


def varying_manual_axes(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps, of more than one device, over which x differs."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return frozenset(axis for axis in _varying(x) if sizes.get(axis, 1) > 1)


def is_varying(x: Any, axis_name: str) -> bool:
    """Whether x may differ over the axis, as far as JAX tracks it."""
    return axis_name in _varying(x)


def vary(tree: Any, axis_name: str | None) -> Any:
    """Marks every array as one that may differ over the axis; no communication."""
    if axis_name is None or not is_checked(axis_name):
        return tree

    def cast(x):
        if axis_name in _varying(x):
            return x
        return lax.pcast(x, (axis_name,), to="varying")

    return jax.tree.map(cast, tree)


def vary_over(tree: Any, axes: Sequence[frozenset[str]]) -> Any:
    """Marks every array as one that may differ over these axes; no communication."""
    leaves, structure = jax.tree.flatten(tree)
    missing = [tuple(a - _varying(x)) for x, a in zip(leaves, axes, strict=True)]
    cast = [
        lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(leaves, missing, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)
