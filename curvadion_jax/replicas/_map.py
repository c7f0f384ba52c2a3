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

from curvadion_jax import _axis_types, _guards, _jaxprs, _mapped, _paths
from curvadion_jax.replicas import _convolutions, _inspect
from curvadion_jax.replicas._average import average_where_synced, check_average
from curvadion_jax.replicas._checks import check_leading


def map_over_replicas(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis_name: str,
    average: Sequence[str] = (),
) -> Callable[..., tuple[Any, Any]]:
    """The step for stacked state [replicas, ...] and the global batch.

    By `vmap`: what the step does stays as it is written, sharding constraints over the
    axes inside a replica included, and gradients are a replica's own. The optimizer in
    it enters a `shard_map` (`_mapped`). Arrays of the state with a name of `average` in
    their path are averaged at syncs.
    """
    number = mesh.shape[axis_name]

    def of_replica(state, batch, *shared):
        result = function(state, batch, *shared)
        _check_result(result, state)
        return result

    def inspected(state, batch, *shared):
        traced = _jaxprs.trace(of_replica, state, batch, *shared)
        own = len(jax.tree.leaves((state, batch)))
        before, after = _names(state), _names(traced.result[0])
        jaxpr, step = traced.program.jaxpr, _mapped.current()
        alone, averaged = _inspect.moved_alone(jaxpr, before, after, own)
        if number == 1:
            alone = []
        alone = [name for name in alone if not set(name.split("/")) & set(average)]
        said = _what_to_say(jaxpr, axis_name, alone, averaged)
        if step:
            step.counts_along = _inspect.counts_along(jaxpr, before, after)
        program = _convolutions.keep_apart(traced.program, mesh, axis_name)
        with _mapped.mapping_program():
            result = traced._replace(program=program)(state, batch, *shared)
        # Where nothing was rejected, and once for all programs of a step.
        if said and not (step and step.is_another):
            warnings.warn(said, stacklevel=3)
        return result

    def divided(x):
        spec = P(axis_name, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def rows(x):
        """[global batch, ...] -> [replicas, batch, ...]."""
        return divided(_axis_types.split_rows(jnp.asarray(x), number))

    def run(state, batch, *shared):
        advice = "replicas; make it with replicate(), and call step(state, batch)"
        check_leading(state, number, "state", advice)
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
        return new, jax.tree.map(divided, metrics)

    return run


def _names(tree: Any) -> list[str]:
    return [name for name, _ in _paths.leaves_with_path(tree)]


def _what_to_say(
    jaxpr: Any, axis_name: str, alone: Sequence[str], averaged: bool
) -> str:
    """Of a step that sends itself, or leaves state apart."""
    found = _jaxprs.collectives_in(jaxpr, axis_name, outside=_guards.SCOPE)
    sent = sum(_jaxprs.bytes_given(equation) for equation in found)
    if step := _mapped.current():
        step.sent_outside, step.averaged = sent, averaged
    if found:
        what = ", ".join(
            f"{e.primitive.name} of {e.invars[0].aval.str_short()}" for e in found
        )
        return (
            f"the training step itself communicates over {axis_name!r}, besides the "
            f"optimizer: {what}, {sent} bytes a replica and step. "
            "Gradients, losses and norms must stay each replica's own; what is "
            "meant so, as in a contrastive loss, is not counted by metrics.read"
        )
    if alone:
        names = [name or "the state itself" for name in alone[:4]]
        some = ", ".join(names) + (" ..." if len(alone) > 4 else "")
        arrays = "1 array changes" if len(alone) == 1 else f"{len(alone)} arrays change"
        return (
            f"of the state {arrays} on every replica alone, and no sync brings "
            f"them together: {some}. Replicas drift apart in them. All "
            "trainable parameters belong to one optimizer that synchronises "
            "(curvadion, local_muon, adaptive_sync; other_optimizer takes what is not "
            "a matrix); other state, such as batch statistics or means of parameters, "
            "is averaged at syncs by replicas.step(..., average=('batch_stats',))"
        )
    return ""


def _check_accumulation(state: Any) -> None:
    """Rejects `optax.MultiSteps` around an optimizer that synchronises.

    It runs what it wraps on every micro-step, and keeps the last result alone: each
    micro-step would be a step, with a decision of its own.
    """
    for names, _ in _paths.leaves_with_names(state):
        if "inner_opt_state" in names and names[-2:] == ("metrics", "synced"):
            raise ValueError(
                "optax.MultiSteps around an optimizer that synchronises would decide, "
                "and send, on every micro-step. Accumulate gradients by "
                'optax.microbatch instead (guide, "A batch in parts").'
            )


def _check_batch(batch: Any, number: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(batch):
        shape = np.shape(leaf)
        if not shape or not shape[0] or shape[0] % number:
            raise ValueError(
                f"the batch{jax.tree_util.keystr(path)} of shape {shape} cannot be "
                f"divided over {number} replicas along its first axis: give the "
                f"global batch, of a multiple of {number} rows (what all replicas "
                "share comes after the batch: step(state, batch, shared))"
            )


def _check_result(result: Any, state: Any) -> None:
    pair = isinstance(result, tuple | list) and len(result) == 2
    # (state, metrics) never has the structure of the state alone, which is in it.
    if not pair or jax.tree.structure(result) == jax.tree.structure(state):
        what = "the state alone" if pair else f"a {type(result).__name__}"
        if isinstance(result, tuple | list) and not pair:
            what += f" of {len(result)}"
        raise TypeError(
            f"the training step must return (state, metrics), got {what}: return {{}} "
            "as the metrics if there are none"
        )
