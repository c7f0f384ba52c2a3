"""A training step of one replica, mapped over the leading axis of state and batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _jax_internals, _mapped, _paths
from curvadion_jax.replicas._average import average_where_synced


def map_over_replicas(
    function: Callable[..., tuple[Any, Any]],
    step: _mapped.MappedStep,
    average: Sequence[str],
    local: Sequence[str],
) -> Callable[..., tuple[Any, Any]]:
    """Maps a step over stacked state [replicas, ...] and the global batch.

    `vmap` leaves the step as it is written, with its sharding constraints over axes
    inside a replica. The optimizer in it enters a `shard_map` (`_mapped`).
    """
    mesh, axis_name = step.mesh, step.axis_name
    replicas = mesh.shape[axis_name]

    def checked(state, batch, *shared):
        """The user's step of one replica, after a look at its program."""
        step.is_program = False
        traced = _jax_internals.trace(function, state, batch, *shared)
        _check_result(traced.result, state)
        _inspect(traced, step, state, local)
        step.is_program = True
        return traced(state, batch, *shared)

    def sharded(x):
        spec = P(axis_name, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def divided(x):
        """[global batch, ...] -> [replicas, batch, ...], sharded as before."""
        x = jnp.asarray(x)
        old = jax.typeof(x).sharding
        split = lax.reshape(
            x,
            (replicas, len(x) // replicas, *x.shape[1:]),
            out_sharding=old.update(spec=P(None, *old.spec)),
        )
        return sharded(split)

    def run(state, batch, *shared):
        _check_batch(batch, replicas)
        axes = (0, 0, *[None] * len(shared))
        mapped = jax.vmap(checked, axes, axis_name=axis_name, spmd_axis_name=axis_name)
        new, metrics = mapped(state, jax.tree.map(divided, batch), *shared)
        if average:
            new = average_where_synced(new, state, average, step)
        return new, jax.tree.map(sharded, metrics)

    return run


def _inspect(
    traced: _jax_internals.Traced,
    step: _mapped.MappedStep,
    state: Any,
    local: Sequence[str],
) -> None:
    """Notes what a step's program does, and rejects one that would train wrongly."""
    before, after = (
        [names for names, _ in _paths.leaves_with_names(tree)]
        for tree in (state, traced.result[0])
    )
    jaxpr = traced.program.jaxpr
    sources, params = _jax_internals.sources(jaxpr)
    step.params = {names for i, names in enumerate(before) if i in params}
    pairs = enumerate(zip(before, sources, strict=False))
    # The arrays of the state that the step returns as they are.
    kept = {names for i, (names, found) in pairs if found == {i}}
    optimizers = _counters.optimizer_paths(traced.result[0])
    counters = [(*path, "metrics", "steps") for path in optimizers]
    step.counters = [names for names in counters if names not in kept]
    # If no step is counted, the update was looked at and dropped.
    dropped = bool(counters) and not step.counters
    step.updates = 0 if dropped else _jax_internals.updates_in(jaxpr)
    step.communicates = ", ".join(
        f"{each.primitive.name} of {each.invars[0].aval.str_short()}"
        for each in _jax_internals.collectives_in(jaxpr, step.axis_name)
    )
    _paths.check_named(before, local, "local")
    changed = [
        names
        for x, names in zip(jaxpr.outvars, before, strict=False)
        if names not in kept
        and jnp.issubdtype(x.aval.dtype, jnp.inexact)
        and not _paths.lies_in(names, local)
    ]
    if changed and not step.updates:
        _require_one_replica(step)
    for i, (names, found) in enumerate(zip(after, sources, strict=False)):
        is_old = i in found & params and names in before[i : i + 1]
        if _jax_internals.MIXED in found:
            _check_choice(names, is_old, optimizers)


def _require_one_replica(step: _mapped.MappedStep) -> None:
    """Rejects, with several replicas, a step that changes its state without a sync."""
    if (replicas := step.mesh.shape[step.axis_name]) > 1:
        raise ValueError(
            "The training step changes its state, and no optimizer in it synchronises: "
            f"{replicas} replicas would train {replicas} models. Use local_muon, "
            "curvadion or adaptive_sync and keep its state, or name in local= what may "
            "differ."
        )


def _check_choice(names: _paths.Names, is_old: bool, optimizers) -> None:
    """Rejects a choice between new and old parameters, or states of an optimizer."""
    # Fields that must agree on all replicas; inner states need not.
    if is_old or _counters.is_within(names, optimizers, "sync_state", "metrics"):
        raise ValueError(
            f"The step keeps the old {'/'.join(names)!r} on a condition, as by "
            "jnp.where, and may miss a sync. Drop the condition, as updates are always "
            "finite; freeze parameters in the forward pass, or put it inside: "
            "adaptive_sync(optax.apply_if_finite(inner, 3), ...)."
        )


def _check_result(result: Any, state: Any) -> None:
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    # (state, metrics) never has the structure of the state alone, which is in it.
    if not is_pair or jax.tree.structure(result) == jax.tree.structure(state):
        raise TypeError(
            "The training step must return (state, metrics), and returned "
            f"{result!r:.200}. Return {{}} if there are no metrics."
        )


def _check_batch(batch: Any, replicas: int) -> None:
    leaves = _paths.leaves_with_path(batch)
    lengths = {np.shape(x)[:1] or (0,): name for name, x in leaves}
    if len(lengths) > 1 or any(n % replicas or not n for (n,) in lengths):
        found = ", ".join(f"{name!r} has {n}" for (n,), name in lengths.items())
        raise ValueError(
            f"The arrays of a batch need one number of rows, divisible by {replicas} "
            f"replicas: {found}. Give the global batch; what all replicas share comes "
            "after it: step(state, batch, shared)."
        )
