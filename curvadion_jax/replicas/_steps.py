"""A training step, written for one replica, and the gradient in it."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from curvadion_jax.replicas._average import check_names
from curvadion_jax.replicas._compiled import CompiledStep
from curvadion_jax.replicas._map import map_over_replicas
from curvadion_jax.replicas._mesh import AXIS, check_axis
from curvadion_jax.replicas._several import CompiledSteps, run_several


def step(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    *,
    axis_name: str = AXIS,
    donate: bool = True,
    average: Sequence[str] = (),
) -> CompiledStep:
    """Runs the training step that you have on every replica.

    A step written for a data-parallel `jit` runs unchanged, with its sharding
    constraints over the axes inside a replica: it is mapped by `jax.vmap` over the
    leading axis of the state, and sees one replica's state and rows. Its gradients are
    therefore a replica's own; the optimizer inside, built with `axis_name`, does what
    has to be sent. ``jax.lax.axis_index(axis_name)`` is the replica's number, for keys
    of its own. It is traced as under `jax.jit`: in the context of this mesh where
    `jax.set_mesh` has set it, else without one.

    Warns once, with names, if state changes that no sync reaches (a part of the
    parameters under another optimizer, batch statistics), if the step itself
    communicates over the replica axis, or if the compiler has replicas wait for each
    other outside of the optimizer.

    Args:
      function: ``(state, batch, *shared)`` -> (state, metrics) of one replica, without
        a replica axis. No `pmean`, neither of gradients nor of the loss.
      mesh: mesh with the replica axis, of type Auto; the axes inside a replica are of
        type Auto or Explicit.
      axis_name: name of the replica axis.
      donate: whether the state's buffers are reused; the state passed in is then gone,
        and only what the step returned may be used.
      average: names in the paths of the state, such as ("batch_stats",): floating-point
        arrays below them are averaged over the replicas at every sync, in float32, over
        those whose arrays are finite. Their bytes are counted.

    Returns:
      A compiled function ``(state, batch, *shared)`` -> (state, metrics). The state
      has a leading replica axis (`replicate`). The batch has not: its arrays [global
      batch, ...] are divided over the replicas. What follows is given to all replicas
      alike, such as the number of the step; it is the same on all of them by its type.
      The metrics come back with a replica axis, one value a replica, nothing averaged.
      Inside a replica the compiler divides the work as state and batch are divided over
      the inner axes of the mesh; the state comes back as it came. `lower` gives the
      program, or with ``sync=True`` or False that of a sync step or a local step, where
      the trigger looks at counters alone.

    Raises:
      TypeError: if an argument is of the wrong kind, or when called, if the function
        does not return a pair.
      ValueError: if the mesh has no such axis or another mesh is the context, or when
        called, if a leaf of the state lacks the replica axis or was donated before, a
        batch cannot be divided, gradients were averaged over the replicas, the
        optimizer has another `axis_name` or stands inside a condition of a replica's
        own or `optax.MultiSteps`, or `average` names nothing.

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
    run = _checked(function, mesh, axis_name, donate, average)
    return CompiledStep(function, run, mesh, axis_name, donate)


def steps(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    *,
    axis_name: str = AXIS,
    donate: bool = True,
    average: Sequence[str] = (),
) -> CompiledSteps:
    """Runs several training steps on every replica in one program.

    The results are those of as many calls of `step`. It is for syncs with a delay
    (`reconcile(delay=k)`): one that ends among the steps depends on none of those
    before it, so that a compiler may have what is sent cross behind them. (XLA for
    TPUs does so with all of two replicas' codes, and of exact means, and with half of
    the codes of more replicas: docs/hiding.md.) A sync that
    begins within the program, or has no delay, is waited for like any other.

    What is due on which of the steps is a part of the program: for syncs every k steps
    give k batches at once, or a multiple of k, and one program does.

    Args:
      function: as for :func:`step`.
      mesh: as for :func:`step`.
      axis_name: as for :func:`step`.
      donate: as for :func:`step`.
      average: as for :func:`step`; what is averaged is waited for.

    Returns:
      A compiled function ``(state, batches, *shared)`` -> (state, metrics), like that
      of :func:`step`, but that arrays of the batches have a leading axis of steps,
      [steps, global batch, ...], as have those that are shared, and the metrics,
      [steps, replicas, ...]. The state must keep its shapes and dtypes. `lower` gives
      the program, with ``begins=`` and ``ends=`` that of known syncs.

    Raises:
      TypeError: as :func:`step`, and if the state changes its shapes or dtypes.
      ValueError: as :func:`step`, and if arrays have no common number of steps.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax.replicas import make_mesh, replicate
      >>> def count(state, batch):
      ...     return state + batch.sum(), {"sum": batch.sum()}
      >>> mesh = make_mesh(1)
      >>> state, metrics = steps(count, mesh)(replicate(0.0, mesh), jnp.ones((3, 4)))
      >>> float(state[0]), metrics["sum"].ravel().tolist()
      (12.0, [4.0, 4.0, 4.0])
    """
    run = _checked(function, mesh, axis_name, donate, average)
    return CompiledSteps(function, run_several(run), mesh, axis_name, donate)


def _checked(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis_name: str,
    donate: bool,
    average: Sequence[str],
) -> Callable[..., Any]:
    """The step for all replicas, if the arguments are what they must be."""
    if not callable(function):
        raise TypeError(
            "the first argument must be the training step, a function (state, batch) "
            f"-> (state, metrics), got {function!r}"
        )
    check_axis(mesh, axis_name)
    return map_over_replicas(function, mesh, axis_name, check_names(average))
