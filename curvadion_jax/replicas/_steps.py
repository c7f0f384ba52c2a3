"""A training step, written for one replica, and the gradient in it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from curvadion_jax import _arguments, _collectives
from curvadion_jax.replicas._compiled import CompiledStep
from curvadion_jax.replicas._map import map_over_replicas
from curvadion_jax.replicas._mesh import AXIS, check_axis


def step(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    *,
    axis_name: str = AXIS,
    donate: bool = True,
) -> CompiledStep:
    """Runs a training step, written for one replica, on all of them.

    Args:
      function: ``(state, batch, *shared)`` -> (state, metrics) of one replica, without
        a replica axis. Gradients must stay local: no `pmean`, neither of gradients nor
        of the loss. The optimizer inside does what has to be sent.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.
      donate: whether the state's buffers are reused; the state passed in is then gone,
        and only what the step returned may be used.

    Returns:
      A compiled function ``(state, batch, *shared)`` -> (state, metrics). The state
      has a leading replica axis (`replicate`). The batch has not: its arrays [global
      batch, ...] are divided over the replicas. What follows is given to all replicas
      alike, such as the number of the step; it is the same on all of them by its type.
      The metrics come back with a replica axis, one value a replica, nothing averaged.
      Inside a replica the compiler divides the work as state and batch are divided over
      the inner axes of the mesh; the state comes back as it came. `lower` gives the
      program.

    Raises:
      TypeError: if an argument is of the wrong kind, or when called, if the function
        does not return a pair.
      ValueError: if the mesh has no such axis, or when called, if a leaf of the state
        lacks the replica axis or was donated before, or a batch cannot be divided.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax.replicas import make_mesh, replicate
      >>> def count(state, batch):
      ...     return state + batch.sum(), {"sum": batch.sum()}
      >>> mesh = make_mesh(1)
      >>> state, metrics = step(count, mesh)(replicate(0.0, mesh), jnp.ones(4))
      >>> metrics["sum"].tolist()
      [4.0]
    """
    if not callable(function):
        raise TypeError(
            "the first argument of step must be the training step, a function (state, "
            f"batch) -> (state, metrics), got {function!r}"
        )
    check_axis(mesh, axis_name)
    _arguments.check_switch(donate, "donate")
    run = map_over_replicas(function, mesh, axis_name)
    return CompiledStep(function, run, mesh, axis_name, donate)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: str | None = None,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """`jax.value_and_grad` that refuses a loss averaged over the replicas.

    A `pmean` in the loss gives gradients that are merely divided by the number of
    replicas, which no optimizer can see, and a message on every step. Inside
    `replicas.step` the loss must be each replica's own.

    Args:
      function: the loss function.
      argnums: as for `jax.value_and_grad`.
      has_aux: as for `jax.value_and_grad`.
      axis_name: name of the replica axis; None is every axis of the `shard_map` around.
        Outside of one nothing is checked.
      transform: what differentiates, such as `flax.nnx.value_and_grad`.

    Returns:
      A function that returns (value, gradients), or ((value, aux), gradients).

    Raises:
      ValueError: when traced, if the loss is the same on all replicas by its type.

    Example:
      >>> loss, gradient = value_and_grad(lambda w: w**2)(3.0)
      >>> float(loss), float(gradient)
      (9.0, 6.0)
    """
    differentiate = transform(function, argnums=argnums, has_aux=has_aux)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        value, gradients = differentiate(*args, **kwargs)
        loss = value[0] if has_aux else value
        for axis in _collectives.checked_axes():
            watched = axis_name is None or axis == axis_name
            if watched and not _collectives.is_varying(loss, axis):
                raise ValueError(
                    f"the loss is the same on all replicas of {axis!r}: it went "
                    "through a pmean or psum, or depends on no replica's data. Remove "
                    "the reduction; each replica trains on its own loss. (If this is "
                    "no axis of replicas, pass axis_name.)"
                )
        return value, gradients

    return wrapped
