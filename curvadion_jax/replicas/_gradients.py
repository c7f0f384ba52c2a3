"""The gradient of one replica's loss, of all of its rows or of some at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvadion_jax import (
    _arguments,
    _axis_types,
    _collectives,
    _jaxprs,
    _orthonormalize,
)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    microbatches: int = 1,
    axis_name: str | None = None,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """`jax.value_and_grad` that accumulates over micro-batches.

    In place of `optax.MultiSteps`, which would have the optimizer decide on every
    micro-step. Inside a `shard_map` of your own it also rejects a loss that was
    averaged over the replicas: a `pmean` in the loss gives gradients that are merely
    divided by the number of replicas, which no optimizer can see.

    Args:
      function: the loss function, a mean over the rows of a batch.
      argnums: as for `jax.value_and_grad`.
      has_aux: as for `jax.value_and_grad`.
      microbatches: in how many parts the rows are taken, one after the other. All
        arrays in positional arguments other than `argnums` are divided along their
        first axis; keyword arguments are given to every part, keys of dropout too.
      axis_name: name of the replica axis; None is every axis of the `shard_map` around.
        Outside of one nothing is checked.
      transform: what differentiates, such as `flax.nnx.value_and_grad`.

    Returns:
      A function that returns what that of `jax.value_and_grad` does. Of several
      micro-batches it is the mean, and what is no floating-point array in the auxiliary
      data is that of the last one.

    Raises:
      TypeError: if `microbatches` is not an int.
      ValueError: if it is below 1, or above 1 with a `transform`; when traced, if rows
        cannot be divided, or if the loss is the same on all replicas by its type.

    Example:
      >>> loss = lambda w, x: jnp.mean((w * x) ** 2)
      >>> value, gradient = value_and_grad(loss, microbatches=2)(3.0, jnp.arange(4.0))
      >>> float(value), float(gradient)
      (31.5, 21.0)
    """
    _arguments.check_steps(microbatches, "microbatches")
    if microbatches > 1 and transform is not jax.value_and_grad:
        raise ValueError(
            "microbatches are for jax.value_and_grad, got another transform: "
            "differentiate a function of arrays (flax.nnx.split, flax.nnx.merge)"
        )
    differentiate = transform(function, argnums=argnums, has_aux=has_aux)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if microbatches == 1:
            value, gradients = differentiate(*args, **kwargs)
        else:
            by_argument = functools.partial(differentiate, **kwargs)
            value, gradients = _accumulated(by_argument, args, argnums, microbatches)
        _check_loss(value[0] if has_aux else value, axis_name)
        return value, gradients

    return wrapped


def _accumulated(differentiate, args, argnums, number: int):
    """Means of what is returned for parts of the rows, in one loop."""
    own = {argnums} if isinstance(argnums, int) else set(argnums)
    own = {index % len(args) for index in own}
    rows = [x for index, x in enumerate(args) if index not in own]

    def part(path, x):
        shape = np.shape(x)
        if not shape or shape[0] % number:
            raise ValueError(
                f"rows{jax.tree_util.keystr(path)} of shape {shape} cannot be divided "
                f"into {number} micro-batches along the first axis; what is no batch "
                "goes in by name"
            )
        return _axis_types.split_rows(jnp.asarray(x), number)

    def take(rows):
        given = iter(rows)
        return differentiate(
            *(x if i in own else next(given) for i, x in enumerate(args))
        )

    def add(total, rows):
        return jax.tree.map(_sum, total, traced(rows)), None

    parts = jax.tree.map_with_path(part, rows)
    traced = _jaxprs.trace(take, jax.tree.map(lambda x: x[0], parts))
    start = jax.tree.map(_zeros, traced.types)
    axes = _jaxprs.axes_of_results([traced])
    total, _ = lax.scan(add, _collectives.vary_over(start, axes), parts)
    return jax.tree.map(
        lambda t, x: (t / number).astype(x.dtype) if _is_float(x) else t,
        total,
        traced.result,
    )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _wide(x: Any) -> Any:
    return _orthonormalize.compute_dtype(x.dtype) if _is_float(x) else x.dtype


def _zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, _wide(x), out_sharding=x.sharding)


def _sum(total: jax.Array, x: Any) -> jax.Array:
    x = jnp.asarray(x)  # a constant comes as a number of Python
    return total + x.astype(total.dtype) if _is_float(x) else x


def _check_loss(loss: jax.Array, axis_name: str | None) -> None:
    for axis in _collectives.checked_axes():
        watched = axis_name is None or axis == axis_name
        if watched and not _collectives.is_varying(loss, axis):
            raise ValueError(
                f"the loss is the same on all replicas of {axis!r}: it went "
                "through a pmean or psum, or depends on no replica's data. Remove "
                "the reduction; each replica trains on its own loss. (If this is "
                "no axis of replicas, pass axis_name.)"
            )
