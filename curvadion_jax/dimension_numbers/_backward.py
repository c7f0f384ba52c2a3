"""Which equations belong to the backward pass of a gradient within the loss.

A loss may have a gradient in it, as of an energy. Its backward pass multiplies with
each matrix once more, with inputs and outputs exchanged. That product is no layer, and
no field of a jaxpr tells it from one. But JAX writes into an equation's name stack
which transformations made it, as profilers show it, and backward passes are made by
`transpose`. A test of this JAX is made before every reading: if its name stacks do not
say so, every product is asked about.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

_MARK = "transpose("


def is_backward(equation: Any) -> bool:
    """Whether the equation itself is marked; those of a call within it are not."""
    return _MARK in str(equation.source_info.name_stack)


def has_backward(program: Any) -> bool:
    """Whether a jaxpr, or one within it, has an equation of a backward pass."""
    return any(
        is_backward(equation)
        or any(map(has_backward, jaxprs_in_params(equation.params)))
        for equation in program.eqns
    )


def is_marked_by_jax() -> bool:
    """Whether this version of JAX marks the backward pass of a gradient."""
    return has_backward(jax.make_jaxpr(jax.grad(jnp.sin))(1.0).jaxpr)
