"""Trees that belong together, or are refused by the name of the first leaf that tells.

Shapes and dtypes alone are looked at, when a program is traced.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _paths


def check_trainable(params: Any) -> None:
    """Rejects parameters that are no real floating-point numbers of at least 16 bits.

    Integers and complex numbers would not be averaged, and 8 bits have no arithmetic.
    """
    for name, leaf in _paths.leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(
                f"Parameter {name!r} has dtype {leaf.dtype}; only real floating-point "
                "numbers of 16 bits or more can be trained. Keep others out of what "
                "init and update are given, or cast in the loss."
            )


def check_gradients(gradients: Any, params: Any) -> None:
    """Rejects gradients of other names or shapes, and missing parameters."""
    if params is None:
        raise ValueError(
            "This optimizer needs the parameters. Call update(gradients, state, params)"
        )
    remedy = "Differentiate with respect to these parameters, without a replica axis."
    _check_shapes(gradients, params, "Gradient", remedy)


def check_state_type(state: Any, kind: type) -> None:
    """Rejects what is not the state of this optimizer, such as swapped arguments."""
    if not isinstance(state, kind):
        raise TypeError(
            f"The state must be of type {kind.__name__}, got a {type(state).__name__}. "
            "Call update(gradients, state, params) with what this optimizer's init or "
            "last update returned."
        )


def check_state(state: Any, expected: Any) -> None:
    """Rejects a state whose arrays are others than `init` makes for the parameters.

    Args:
      state: what `update` was given.
      expected: what `init` returns for the parameters that `update` was given.
    """
    remedy = (
        "Pass what init made of these parameters, or the last update returned, without "
        "a replica axis."
    )
    _check_shapes(state, expected, "Array of the optimizer state", remedy)


def _check_shapes(tree: Any, expected: Any, what: str, remedy: str) -> None:
    # By names, since not every class of nodes knows what is equal. An array of another
    # shape might be broadcast without an error.
    found, wanted = (
        {name: jnp.shape(x) for name, x in _paths.leaves_with_path(each)}
        for each in (tree, expected)
    )
    for name in [*wanted, *found]:
        shape, other = (shapes.get(name, "missing") for shapes in (found, wanted))
        if shape != other:
            raise ValueError(f"{what} {name!r} is {shape}, expected {other}. {remedy}")


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
