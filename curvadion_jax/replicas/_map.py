"""A training step of one replica, mapped over the leading axis of state and batch."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _axis_types, _guards, _jax_internals, _mapped, _paths
from curvadion_jax.replicas import _convolutions
from curvadion_jax.replicas._average import average_where_synced, check_average
from curvadion_jax.replicas._placed import check_leading


def map_over_replicas(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis_name: str,
    average: Sequence[str] = (),
    local: Sequence[str] = (),
) -> Callable[..., tuple[Any, Any]]:
    """The step for stacked state [replicas, ...] and the global batch.

    By `vmap`: what the step does stays as it is written, sharding constraints over the
    axes inside a replica included, and gradients are a replica's own. The optimizer in
    it enters a `shard_map` (`_mapped`). Arrays of the state with a name of `average` in
    their path are averaged at syncs, and those with one of `local` are meant to differ.
    """
    number, local_names = mesh.shape[axis_name], set(local)

    def of_replica(state, batch, *shared):
        result = function(state, batch, *shared)
        _check_result(result, state)
        return result

    def inspected(state, batch, *shared):
        traced = _jax_internals.trace(of_replica, state, batch, *shared)
        names = [names for names, _ in _paths.leaves_with_names(state)]
        ours = [local_names.isdisjoint(each) for each in names]
        _inspect(traced, axis_name, number, ours)
        program = _convolutions.keep_apart(traced.program, mesh, axis_name)
        with _mapped.mapping_program():
            return traced._replace(program=program)(state, batch, *shared)

    def sharded(x):
        spec = P(axis_name, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def rows(x):
        """[global batch, ...] -> [replicas, batch, ...]."""
        return sharded(_axis_types.split_rows(jnp.asarray(x), number))

    def run(state, batch, *shared):
        check_leading(state, number, "state")
        _check_accumulation(state)
        if average:
            check_average(state, average)
        _check_batch(batch, number)
        axes = (0, 0, *[None] * len(shared))
        mapped = jax.vmap(
            inspected, axes, axis_name=axis_name, spmd_axis_name=axis_name
        )
        new, metrics = mapped(state, jax.tree.map(rows, batch), *shared)
        if average:
            new = average_where_synced(new, state, average, mesh, axis_name)
        return new, jax.tree.map(sharded, metrics)

    return run


def _inspect(
    traced: _jax_internals.Traced, axis_name: str, replicas: int, ours: Sequence[bool]
) -> None:
    """Looks at a step's program for what it sends itself, and for its optimizer.

    `ours` says of the arrays of the state which are to be the same on all replicas.
    """
    jaxpr, step = traced.program.jaxpr, _mapped.current()
    updates = _jax_internals.updates_in(jaxpr, _guards.SCOPE)
    found = _jax_internals.collectives_in(jaxpr, axis_name, outside=_guards.SCOPE)
    if step:
        step.updates = updates
        step.reduced = _jax_internals.reduced_inputs(jaxpr, axis_name, _guards.SCOPE)
    if found and not (step and step.due):  # once for both programs of a step
        what = ", ".join(
            f"{e.primitive.name} of {e.invars[0].aval.str_short()}" for e in found
        )
        sent = sum(map(_jax_internals.bytes_given, found))
        warnings.warn(
            f"The training step itself communicates over {axis_name!r}, besides the "
            f"optimizer: {what}, {sent} bytes per replica and step. Keep gradients, "
            "losses and norms each replica's own; metrics.read does not count this.",
            stacklevel=3,
        )
    moved = any(
        x is not y and of_all and jnp.issubdtype(x.aval.dtype, jnp.inexact)
        for x, y, of_all in zip(jaxpr.outvars, jaxpr.invars, ours, strict=False)
    )
    if replicas > 1 and moved and not updates:
        raise ValueError(
            "The training step changes its state, and no optimizer in it synchronises: "
            f"{replicas} replicas would train {replicas} models. Use local_muon, "
            "curvadion or adaptive_sync."
        )


def _check_accumulation(state: Any) -> None:
    """Rejects `optax.MultiSteps` around an optimizer that synchronises.

    It runs what it wraps on every micro-step, and keeps the last result alone: each
    micro-step would be a step, with a decision of its own.
    """
    for names, _ in _paths.leaves_with_names(state):
        if "inner_opt_state" in names and names[-2:] == ("metrics", "synced"):
            raise ValueError(
                "optax.MultiSteps around an optimizer that synchronises would send on "
                "every micro-step. Accumulate the gradients before the update, as by "
                "optax.microbatching."
            )


def _check_batch(batch: Any, number: int) -> None:
    rows: dict[int, str] = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        name, shape = jax.tree_util.keystr(path), np.shape(leaf)
        if not shape or not shape[0] or shape[0] % number:
            raise ValueError(
                f"The batch{name} of shape {shape} cannot be divided over {number} "
                "replicas along its first axis. Give the global batch; what all "
                "replicas share comes after it: step(state, batch, shared)."
            )
        rows.setdefault(shape[0], name)
    if len(rows) > 1:
        (first, name), (second, other), *_ = rows.items()
        raise ValueError(
            f"The batch{name} has {first} rows, and the batch{other} {second}. What "
            "is not per row comes after the batch: step(state, batch, shared)."
        )


def _check_result(result: Any, state: Any) -> None:
    pair = isinstance(result, tuple | list) and len(result) == 2
    # (state, metrics) never has the structure of the state alone, which is in it.
    if not pair or jax.tree.structure(result) == jax.tree.structure(state):
        got = "the state alone" if pair else f"a {type(result).__name__}"
        raise TypeError(
            f"The training step must return (state, metrics), got {got}. Return {{}} "
            "if there are no metrics."
        )
