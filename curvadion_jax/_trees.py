"""Rejects trees that do not belong together, by the name of the first leaf that tells.

Shapes and dtypes alone are looked at, when a program is traced.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _paths


def summary(self: Any) -> str:
    """A named tuple in a line: how much each field holds, and none of the numbers."""
    no_arrays = not all(hasattr(x, "dtype") for x in jax.tree.leaves(self))

    def of_field(field):
        if no_arrays:  # their shapes, say
            return repr(field)
        arrays = jax.tree.leaves(field)
        size = sum(x.size * x.dtype.itemsize for x in arrays)
        return f"<{len(arrays)} arrays, {size:,} bytes>"

    fields = zip(self._fields, map(of_field, self), strict=True)
    inside = ", ".join(f"{name}={what}" for name, what in fields)
    return f"{type(self).__name__}({inside})"


def are_alike(tree: Any, other: Any) -> bool:
    """Whether two trees have the same structure, and leaves of the same shapes.

    A user's own class of nodes need not know what is equal, so that trees of shapes are
    not compared.
    """
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(jnp.shape(x) == jnp.shape(y) for x, y in pairs)


def check_arrays(params: Any) -> None:
    """Rejects parameters of which a leaf is no array."""
    for name, leaf in _paths.leaves_with_path(params):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"the parameter {name!r} is {leaf!r}, and parameters must be arrays: "
                "give the tree that the model's init returned, or jax.numpy.asarray of "
                "a number"
            )


def check_gradients(gradients: Any, params: Any) -> None:
    """Rejects gradients of another tree, shape or kind than the parameters."""
    check_arrays(params)
    if jax.tree.structure(gradients) != jax.tree.structure(params):
        raise ValueError(
            "gradients and parameters must be trees of the same structure, and "
            f"{_difference(gradients, params)}: give update(gradients, state, params) "
            "the gradients with respect to these parameters"
        )
    pairs = zip(
        _paths.leaves_with_path(params), jax.tree.leaves(gradients), strict=True
    )
    for (name, param), gradient in pairs:
        if param.shape != np.shape(gradient):
            raise ValueError(
                f"the gradient of {name!r} has shape {np.shape(gradient)}, the "
                f"parameter {param.shape}: differentiate with respect to the "
                "parameters that update is given, both without a replica axis"
            )
        if not jnp.issubdtype(param.dtype, jnp.floating):
            raise TypeError(
                f"the parameter {name!r} has dtype {param.dtype}; only real "
                "floating-point parameters can be trained. Keep others out of "
                "what init and update are given"
            )
        if not jnp.issubdtype(jnp.result_type(gradient), jnp.floating):
            raise TypeError(
                f"the gradient of {name!r} has dtype {jnp.result_type(gradient)}, the "
                f"parameter {param.dtype}: give real floating-point gradients"
            )


def check_state_type(state: Any, kind: type) -> None:
    """Rejects what is not the state of this optimizer, such as swapped arguments."""
    if not isinstance(state, kind):
        raise TypeError(
            f"the state must be of type {kind.__name__}, got a {type(state).__name__}: "
            "call update(gradients, state, params) with what init or the last update "
            "of this optimizer returned"
        )


def _difference(given: Any, known: Any) -> str:
    """The first leaf, or else the nodes, by which gradients differ from parameters."""
    names = [name for name, _ in _paths.leaves_with_path(given)]
    wanted = [name for name, _ in _paths.leaves_with_path(known)]
    for name in wanted:
        if name not in names:
            return f"there is no gradient of {name!r}"
    for name in names:
        if name not in wanted:
            return f"the gradient {name!r} belongs to no parameter"
    return f"these are\n{jax.tree.structure(given)}\nand\n{jax.tree.structure(known)}\n"


def check_state(state: Any, expected: Any) -> None:
    """Rejects a state whose arrays are others than `init` makes for the parameters.

    Args:
      state: what `update` was given.
      expected: what `init` returns for the parameters that `update` was given.
    """
    found, wanted = _shapes(state), _shapes(expected)
    for name in [*wanted, *found]:
        shape, other = found.get(name, "missing"), wanted.get(name, "missing")
        if shape != other:
            raise ValueError(
                f"the array {name!r} of the optimizer state is {shape}, and for these "
                f"parameters it would be {other}: give update the state that init made "
                "of the same parameters, or that the last update returned (in a "
                "shard_map of your own without the leading replica axis)"
            )


def _shapes(tree: Any) -> dict[str, str]:
    return {
        name: f"of shape {np.shape(x)}" for name, x in _paths.leaves_with_path(tree)
    }


def like(tree: Any, other: Any) -> Any:
    """A tree with the dtypes of another, where the structures agree."""
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return tree
    # A random key has no cast, not even to its own type.
    return jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), tree, other
    )


def float32_bytes(tree: Any) -> int:
    """Bytes of all arrays if they were float32, as gradients are sent."""
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(tree))


def is_placeholder(params: Any) -> bool:
    """Whether `optax.tree.map_params` asks what of the state is parameter-like."""
    structure = jax.tree.structure(params)
    known = Mapping | list | tuple | None
    empty = structure.num_leaves == 0 and structure.num_nodes == 1
    return empty and not isinstance(params, known)
