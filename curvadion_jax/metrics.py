"""Reads the counters in the optimizer state: what was sent, when and why."""

import math
from typing import Any

import jax
import numpy as np

from curvadion_jax import _paths
from curvadion_jax._counters import WORD, SyncMetrics, counter_paths

_FAULTS = ("nonfinite", "zeroed", "excluded")


class Report(dict[str, Any]):
    """What :func:`read` returns: a dictionary, printed as a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        forms = {int: "{:,}", float: "{:.4g}"}
        shown = {name: forms.get(type(x), "{}").format(x) for name, x in self.items()}
        return "\n".join(f"{name:{width}}  {text}" for name, text in shown.items())


def observe(opt_state: Any) -> SyncMetrics:
    """Finds the counters in an optimizer state, for use inside a training step.

    Return them among the step's metrics: a few scalars that are not donated with the
    state, so the host can read them while the next step runs.

    Args:
      opt_state: state that holds one optimizer that synchronises, such as
        `local_muon`, in a chain, wrapped or inside nnx.

    Returns:
      The counters, with a leading replica axis if the state has one.
    """
    leaves = dict(_paths.leaves_with_names(opt_state))
    found = counter_paths(leaves)
    if len(found) != 1:
        raise ValueError(
            f"A {type(opt_state).__name__} holds the states of {len(found)} optimizers "
            "that synchronise. Give the state of one, or what observe returned."
        )
    return SyncMetrics(*(leaves[*found[0], field] for field in SyncMetrics._fields))


def read(opt_state: Any, params: Any = None) -> Report:
    """Reads the counters as Python numbers.

    This waits for the step that computed them. To keep the device busy, read what
    :func:`observe` returned one step late.

    Args:
      opt_state: optimizer state, or anything that holds what `observe` returned, with a
        leading replica axis; without one, of an optimizer without `axis_name`.
      params: the parameters, or their shapes, whose paths name the `layer`.

    Returns:
      A dictionary, printed as a table, with

      * `steps`, `syncs`, `sync_rate` (their ratio), `synced` (the last step),
        `replicas`, and `votes`: steps on which replicas reduced a decision,
      * `value`: the trigger's last value, the largest of this process; `threshold`:
        what it was compared with; `layer`: path of its parameter in `params`, else its
        index among the leaves. None for a trigger without one,
      * `bytes`: what one of N replicas has sent, 2 (N - 1) / N times what was averaged
        and N - 1 times what was gathered; `synchronous_bytes`: what float32 gradients
        averaged on every step would have sent,
      * `nonfinite`, `zeroed`, `excluded` and `absent`: as in
        :class:`curvadion_jax.SyncMetrics`, summed over the replicas of this process,
      * `troubled`: number of a replica -> its own counts of the first three.

    Raises:
      ValueError: if there are no counters, replicas disagree, or their axis is missing.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.local_muon(0.01).init({"w": jnp.ones((2, 2))})
      >>> read(state)["steps"]
      0
    """
    counters = observe(opt_state)
    has_axis = np.ndim(counters.steps) > 0
    replicas = np.shape(counters.steps)[0] if has_axis else 1
    # The rows of this process, by their first replica, in one transfer.
    parts = jax.device_get(jax.tree.map(lambda x: _held(x, has_axis), counters))
    own = [start + i for start, part in parts.steps.items() for i in range(len(part))]
    join = lambda held: np.concatenate([*held.values()])
    found = jax.tree.map(join, parts, is_leaf=lambda x: isinstance(x, dict))
    steps, syncs = _common(found.steps, "steps"), _common(found.syncs, "syncs")
    averaged, gathered = (found.sent[0] @ [WORD, 1]).tolist()
    synchronous = int(found.synchronous[0] @ [WORD, 1])
    if averaged + gathered and not has_axis:
        raise ValueError(
            "The counters are those of one of several replicas, whose axis is missing. "
            "Give the state of all replicas, or what observe returned for all."
        )
    others = replicas - 1
    # NaN where nothing was compared; a NaN on one replica only is its own.
    worst = int(np.argmax(np.where(np.isnan(found.value), -math.inf, found.value)))
    layer = int(found.layer[worst])
    if params is not None and layer >= 0:
        layer, _ = _paths.leaves_with_path(params)[layer]
    return Report(
        steps=steps,
        syncs=syncs,
        sync_rate=syncs / steps if steps else 0.0,
        synced=bool(_common(found.synced, "synced")),
        value=_shortest(found.value[worst]),
        threshold=_shortest(found.threshold[worst]),
        layer=None if layer == -1 else layer,
        votes=_common(found.votes, "votes"),
        replicas=replicas,
        bytes=round(2 * others * averaged / replicas + others * gathered),
        synchronous_bytes=round(2 * others * synchronous / replicas),
        **{name: int(getattr(found, name).sum()) for name in (*_FAULTS, "absent")},
        troubled=_troubled(found, own),
    )


def _held(array: Any, has_axis: bool) -> dict[int, Any]:
    """Index of a replica -> the part of an array on this host that begins with it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        # The devices of one replica hold the same.
        return {x.index[0].start or 0: x.data for x in array.addressable_shards}
    return {0: array if has_axis else array[None]}


def _shortest(number: np.floating) -> float | None:
    """Turns float32 0.3 into 0.3, and not 0.30000001192092896; None for NaN."""
    return None if np.isnan(number) else float(str(number))


def _common(array: np.ndarray, what: str) -> int:
    values = np.unique(array)
    if len(values) != 1:
        raise ValueError(
            f"Replicas disagree on {what}, {array.tolist()}: they did not run the same "
            "program, and the state cannot be trusted. Restore a checkpoint."
        )
    return int(values[0])


def _troubled(found: SyncMetrics, numbers: list[int]) -> dict[int, dict[str, int]]:
    """Counts the faults of each replica that has any."""
    counts = np.stack([getattr(found, name) for name in _FAULTS], axis=1).tolist()
    return {
        number: {name: count for name, count in zip(_FAULTS, row, strict=True) if count}
        for number, row in zip(numbers, counts, strict=True)
        if any(row)
    }
