"""Whether numbers are finite, and what stands in for those that are not."""

from typing import Any

import jax
import jax.numpy as jnp


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point array of the tree has a NaN or an infinity, bool[]."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if _is_float(x)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def finite_elements(tree: Any) -> Any:
    """The tree with zeros in place of NaN and infinities."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def where(condition: jax.Array, tree: Any, other: Any) -> Any:
    """The leaves of one tree or of another, as one bool[] says."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def floats_where(condition: jax.Array, tree: Any, other: Any) -> Any:
    """As `where` for floating-point leaves; all else is that of the first tree."""
    return jax.tree.map(
        lambda x, y: jnp.where(condition, x, y) if _is_float(x) else x, tree, other
    )
