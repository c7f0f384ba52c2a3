"""A training step of one replica, mapped over the leading axis of state and batch."""

import warnings
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
    step: _mapped.Mapped,
    average: Sequence[str],
    local: Sequence[str],
) -> Callable[..., tuple[Any, Any]]:
    """The step for stacked state [replicas, ...] and the global batch.

    By `vmap`: what the step does stays as it is written, sharding constraints over the
    axes inside a replica included. The optimizer in it enters a `shard_map`
    (`_mapped`).
    """
    mesh, axis_name = step.mesh, step.axis_name
    number = mesh.shape[axis_name]

    def inspected(state, batch, *shared):
        step.is_program = False
        traced = _jax_internals.trace(function, state, batch, *shared)
        result = traced.result
        pair = isinstance(result, tuple | list) and len(result) == 2
        # (state, metrics) never has the structure of the state alone, which is in it.
        if not pair or jax.tree.structure(result) == jax.tree.structure(state):
            raise TypeError(
                "The training step must return (state, metrics), and returned "
                f"{result!r:.200}. Return {{}} if there are no metrics."
            )
        _inspect(traced, step, state, local)
        step.is_program = True
        return traced(state, batch, *shared)

    def sharded(x):
        spec = P(axis_name, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def rows(x):
        """[global batch, ...] -> [replicas, batch, ...], sharded as before."""
        x = jnp.asarray(x)
        old = jax.typeof(x).sharding
        split = lax.reshape(
            x,
            (number, len(x) // number, *x.shape[1:]),
            out_sharding=old.update(spec=P(None, *old.spec)),
        )
        return sharded(split)

    def run(state, batch, *shared):
        _check_batch(batch, number)
        axes = (0, 0, *[None] * len(shared))
        mapped = jax.vmap(
            inspected, axes, axis_name=axis_name, spmd_axis_name=axis_name
        )
        new, metrics = mapped(state, jax.tree.map(rows, batch), *shared)
        if average:
            new = average_where_synced(new, state, average, step)
        return new, jax.tree.map(sharded, metrics)

    return run


def _inspect(
    traced: _jax_internals.Traced,
    step: _mapped.Mapped,
    state: Any,
    local: Sequence[str],
) -> None:
    """Looks at a step's program for what it sends itself, and for its optimizer."""
    jaxpr, axis_name = traced.program.jaxpr, step.axis_name
    updates = _jax_internals.updates_in(jaxpr)
    found = _jax_internals.collectives_in(jaxpr, axis_name)
    before, after = (
        [names for names, _ in _paths.leaves_with_names(each)]
        for each in (state, traced.result[0])
    )
    sources = _jax_internals.sources(jaxpr)
    pairs = zip(before, sources, strict=False)
    kept = {names for index, (names, source) in enumerate(pairs) if source == index}
    optimizers = _counters.optimizer_paths(after)
    if optimizers and kept.issuperset((*p, "metrics", "steps") for p in optimizers):
        updates = 0  # Its state is dropped: a step that is looked at and not taken.
    step.updates = updates
    step.communicates = bool(found)
    if found and not step.due:  # once for both programs of a step
        what = ", ".join(
            f"{e.primitive.name} of {e.invars[0].aval.str_short()}" for e in found
        )
        warnings.warn(
            f"The training step itself communicates over {axis_name!r}, besides the "
            f"optimizer: {what}. Keep gradients, losses and norms each replica's own; "
            "metrics.read does not count this.",
            stacklevel=3,
        )
    _paths.check_named(before, local, "local")
    moved = any(
        names not in kept
        and jnp.issubdtype(x.aval.dtype, jnp.inexact)
        and not _paths.lies_in(names, local)
        for x, names in zip(jaxpr.outvars, before, strict=False)
    )
    replicas = step.mesh.shape[axis_name]
    if replicas > 1 and moved and not updates:
        raise ValueError(
            "The training step changes its state, and no optimizer in it synchronises: "
            f"{replicas} replicas would train {replicas} models. Use local_muon, "
            "curvadion or adaptive_sync and keep its state, or name in local= what may "
            "differ."
        )
    for names, source in zip(after, sources, strict=False):
        # What is the same on all replicas; each may keep an inner state of its own.
        common = _counters.is_within(names, optimizers, {"sync_state", "metrics"})
        if common and source == _jax_internals.MIXED:
            raise ValueError(
                "The step keeps the old optimizer state on a condition, as by "
                "jnp.where, on which replicas may disagree. Put the condition inside: "
                "adaptive_sync(optax.apply_if_finite(inner, 3), ...)."
            )


def _check_batch(batch: Any, number: int) -> None:
    leaves = _paths.leaves_with_path(batch)
    rows = {np.shape(x)[:1] or (0,): name for name, x in leaves}
    if len(rows) > 1 or any(count % number or not count for (count,) in rows):
        found = ", ".join(f"{name!r} has {count}" for (count,), name in rows.items())
        raise ValueError(
            f"The arrays of a batch need one number of rows, divisible by {number} "
            f"replicas: {found}. Give the global batch; what all replicas share comes "
            "after it: step(state, batch, shared)."
        )
