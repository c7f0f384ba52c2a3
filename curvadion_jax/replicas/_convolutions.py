"""Convolutions of a step that is mapped over replicas, each replica's on its own.

Under `vmap` with weights of each replica's own a convolution becomes a grouped one, and
XLA gathers what it reads from all replicas on every step (JAX 0.10.2; a small network
of two replicas on CPU then took six times as long a step). In a `shard_map` over the
replica axis, as the optimizer's update, it stays what it is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import _jax_internals, _layout


def keep_apart(program: Any, mesh: Mesh, axis_name: str) -> Any:
    """The program, of which each convolution enters `shard_map` when it is mapped."""
    separate = functools.partial(_separate, mesh=mesh, axis_name=axis_name)
    return _jax_internals.replaced(program, "conv_general_dilated", separate)


def _separate(equation: Any, mesh: Mesh, axis_name: str) -> Any:
    convolve = functools.partial(equation.primitive.bind, **equation.params)
    mapped = custom_vmap(lambda images, weights: convolve(images, weights))

    @mapped.def_vmap
    def _(size, batched, *operands):
        if not all(batched):  # No groups are needed.
            axes = tuple(0 if each else None for each in batched)
            return jax.vmap(convolve, axes, axis_size=size)(*operands), True

        def of_replica(*operands):
            return convolve(*(jnp.squeeze(x, 0) for x in operands))[None]

        aval: Any = equation.outvars[0].aval
        over_replicas = _layout.over_replicas(
            of_replica, mesh, axis_name, P(axis_name), aval.sharding.spec
        )
        return over_replicas(*operands), True

    return mapped
