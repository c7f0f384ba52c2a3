"""Convolutions of a step that is mapped over replicas, each replica's on its own.

Under `vmap` with weights of each replica's own a convolution becomes a grouped one, and
XLA gathers what it reads from all replicas (JAX 0.10.2). In a `shard_map` over the
replica axis, as the optimizer's update, it stays what it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import _axis_types

_NAME = "conv_general_dilated"


def keep_apart(program: ClosedJaxpr, mesh: Mesh, axis_name: str) -> ClosedJaxpr:
    """The program, of which each convolution enters `shard_map` when it is mapped."""

    def rewritten(value: Any) -> Any:
        """A program, or what holds programs as the parameters of an equation do."""
        if isinstance(value, Jaxpr | ClosedJaxpr):
            inner: Any = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if not _has_any(inner):
                return value
            new = inner.replace(eqns=[*map(of_equation, inner.eqns)])
            return new if inner is value else value.replace(jaxpr=new)
        if type(value) is tuple:  # the branches of a condition
            return tuple(map(rewritten, value))
        return value

    def of_equation(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name == _NAME:
            avals = [x.aval for x in equation.invars]
            (call,) = jax.make_jaxpr(_apart(equation, mesh, axis_name))(*avals).eqns
            return equation.replace(primitive=call.primitive, params=call.params)
        params = {name: rewritten(value) for name, value in equation.params.items()}
        return equation.replace(params=params)

    return rewritten(program)


def _has_any(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name == _NAME
        or any(map(_has_any, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _apart(
    equation: JaxprEqn, mesh: Mesh, axis_name: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def convolve(images, weights):
        return equation.primitive.bind(images, weights, **equation.params)

    @custom_vmap
    def one(images, weights):
        return convolve(images, weights)

    @one.def_vmap
    def _(size, batched, *operands):
        if not all(batched):  # then groups are not needed
            axes = tuple(0 if each else None for each in batched)
            return jax.vmap(convolve, axes, axis_size=size)(*operands), True

        def of_replica(*operands):
            return convolve(*(jnp.squeeze(x, 0) for x in operands))[None]

        aval: Any = equation.outvars[0].aval
        mapped = _axis_types.over_replicas(
            of_replica, mesh, axis_name, P(axis_name), aval.sharding.spec
        )
        return mapped(*operands), True

    return one
