"""Counters of syncs, votes and bytes in the optimizer state, and their reading.

The bytes of a sync are those of `_AdaptiveSync._costs`, from shapes.
"""

from __future__ import annotations

import collections
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from curvadion_jax import _trees
from curvadion_jax.compressors import Payload

__all__ = ["Counters", "Report", "observe", "read"]

_WORD = 2**30


class Counters(NamedTuple):
    """Counters of what happened so far, which :func:`read` reads.

    Scalars are common to all replicas; [R] are rows, of one number for each replica.

    Attributes:
      steps, syncs: int32[], steps taken, and sync steps among them.
      since: int32[], local steps since the last sync, or since the start.
      votes: int32[], steps on which replicas reduced their requests to one decision.
      threshold: float32[], what the last value was compared with.
      costs: int32[4, 2], :class:`Costs` as [high, low] words in base 2**30.
      value: float32[R], the trigger's last value; 0 if it measures nothing.
      layer: int32[R], index of the parameter that it belongs to; -1 if to none.
      nonfinite: int32[R], steps on which gradients were not finite, or so large that
        their squares are not (1e20 in float32).
      zeroed: int32[R], syncs at which finite gradients gave updates that were not, of
        the replica's own step or of the sync. (On all steps such elements become 0.)
      excluded: int32[R], syncs in which a replica had something that was not finite.
      absent: int32[R], syncs in which its weight was 0.
      displaced: int32[R], syncs after which the next step was not given the old
        parameters plus the updates returned. What changes every update, such as a clip
        after the optimizer, shows here. A change on another step is drift, as from
        another gradient, and is not noticed.
      checksum: uint32[R], of the parameters after the last sync, or at the start; 0 is
        unknown.
      moved_checksum: uint32[R], of those before it, after local steps; 0 where these
        have not moved them.
      anchor_checksum: uint32[R], of each replica's copy of the anchor; before the first
        sync, of the first replica's parameters.
    """

    steps: Any
    syncs: Any
    since: Any
    votes: Any
    threshold: Any
    costs: Any
    value: Any
    layer: Any
    nonfinite: Any
    zeroed: Any
    excluded: Any
    absent: Any
    displaced: Any
    checksum: Any
    moved_checksum: Any
    anchor_checksum: Any


class Costs(NamedTuple):
    """Bytes of one replica, of all its devices.

    Attributes:
      averaged, gathered: of a sync, see :class:`curvadion_jax.compressors.Payload`.
      number: of a number of each device, such as a vote, or a weight at a sync.
      gradients: of all gradients in float32.
    """

    averaged: int
    gathered: int
    number: int
    gradients: int

    def of_sync(self, replicas: int) -> float:
        """A sync's bytes over those of an all-reduce of all gradients in float32."""
        payload = Payload(self.averaged, self.gathered)
        return payload.as_averaged(replicas) / max(self.gradients, 1)

    def as_words(self) -> jax.Array:
        return jnp.array([divmod(number, _WORD) for number in self], jnp.int32)


def initial(checksum: jax.Array, costs: Costs) -> Counters:
    """The counters before the first step."""
    zero = jnp.zeros([], jnp.int32)
    zeros = jnp.zeros_like(checksum, jnp.int32)
    return Counters(
        steps=zero,
        syncs=zero,
        since=zero,
        votes=zero,
        threshold=jnp.zeros([], jnp.float32),
        costs=costs.as_words(),
        value=jnp.zeros_like(checksum, jnp.float32),
        layer=jnp.full_like(checksum, -1, jnp.int32),
        nonfinite=zeros,
        zeroed=zeros,
        excluded=zeros,
        absent=zeros,
        displaced=zeros,
        checksum=checksum,
        moved_checksum=jnp.zeros_like(checksum),
        anchor_checksum=jnp.full_like(checksum, checksum.ravel()[0]),
    )


def counted(
    counters: Counters,
    costs: Costs,
    prepared: Any,
    outcome: Any,
    *,
    threshold: Any,
    fire: Any,
    voted: Any,
    displaced: jax.Array,
) -> Counters:
    """Counts a step.

    `prepared` is what `_adaptive_sync` knows of the replicas before the step and
    `outcome` what `_step` knows after it, as rows.
    """

    def plus(count, event):
        return jnp.where(event, jnp.asarray(optax.safe_increment(count)), count)

    at_sync = lambda new, old: jnp.where(fire, new, old)
    found = outcome.checksums
    return Counters(
        steps=plus(counters.steps, True),
        syncs=plus(counters.syncs, fire),
        since=jnp.where(fire, 0, plus(counters.since, True)),
        votes=plus(counters.votes, voted),
        threshold=jnp.asarray(threshold, jnp.float32),
        costs=costs.as_words(),
        value=prepared.value,
        layer=prepared.layer,
        nonfinite=plus(counters.nonfinite, ~prepared.finite),
        zeroed=plus(counters.zeroed, prepared.finite & outcome.zeroed),
        excluded=plus(counters.excluded, outcome.excluded),
        absent=plus(counters.absent, outcome.absent),
        displaced=plus(counters.displaced, displaced),
        checksum=at_sync(found.params, counters.checksum),
        moved_checksum=at_sync(
            jnp.where(found.moved == counters.checksum, 0, found.moved),
            counters.moved_checksum,
        ),
        anchor_checksum=at_sync(found.anchor, counters.anchor_checksum),
    )


class Report(dict[str, Any]):
    """What :func:`read` returns: a dictionary, printed as a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = []
        for name, value in self.items():
            if name in ("share", "sync_rate"):
                text = f"{value:.2%}"
            elif isinstance(value, bool) or not isinstance(value, int | float):
                text = str(value)
            else:
                text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            lines.append(f"{name:{width}}  {text}")
        return "\n".join(lines)


def observe(opt_state: Any) -> Counters:
    """Finds the counters in an optimizer state, for use inside a training step.

    Return them among the step's metrics: a few numbers that are not donated with the
    state, so the host can read them while the next step runs.

    Args:
      opt_state: state that holds one optimizer that synchronises, such as
        `local_muon`, in a chain or wrapped. Of nnx, ``optimizer.opt_state``.

    Returns:
      The :class:`Counters`. They are arrays, so this works under `jax.jit`;
      :func:`read` makes Python numbers of them.

    Raises:
      ValueError: if it holds none, or several.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> params = {"kernel": jnp.ones((2, 2))}
      >>> tx = cd.local_muon(0.01)
      >>> @jax.jit
      ... def step(state):
      ...     updates, state = tx.update(params, state, params)
      ...     return updates, state, observe(state)
      >>> updates, state, counters = step(tx.init(params))
      >>> read(counters)["steps"]
      1
    """
    found = _trees.nodes_of(Counters, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"A {type(opt_state).__name__} holds the states of {len(found)} optimizers "
            "that synchronise. Give the opt_state of one, or what observe returned, "
            "and restore a checkpoint into a target: without one it has dictionaries."
        )
    # nnx keeps each array in a variable.
    values = [jax.tree.leaves(value) for value in found[0]]
    return Counters(*[value[0] for value in values])


def read(opt_state: Any, params: Any = None) -> Report:
    """Reads the counters as Python numbers.

    This waits for the step that computed them. To keep the device busy, read what
    :func:`observe` returned one step late.

    Args:
      opt_state: optimizer state, or anything that holds what `observe` returned.
      params: the parameters, or their shapes, whose paths name the `layer`.

    Returns:
      A dictionary, printed as a table, with

      * `share`: bytes sent, over those of synchronous training,
      * `steps`, `syncs`, `sync_rate` (their ratio), `since` (local steps since the last
        sync), `replicas`, and `votes`: steps on which replicas reduced a decision,
      * `bytes`: bytes that one of N replicas has sent, 2 (N - 1) / N times the arrays
        that were averaged and N - 1 times those that were gathered, if all syncs cost
        as much as now (a sync in which no replica takes part costs less, and counts in
        full); `synchronous_bytes`: the same for float32 gradients averaged on every
        step,
      * of triggers that measure, `value`: the last value, the largest of this process
        (of `at_intervals` the largest since the last sync; absent replicas have one
        too); `threshold`: its limit then; `layer`: path of its parameter in
        `params`, else its index among the leaves,
      * faults, if there were any: the counts of :class:`Counters` from `nonfinite` to
        `displaced`, a list of one number for each replica of this process; `alike`: how
        many replicas had the same parameters as another one before the last sync
        although local steps had moved them, so their gradients were averaged, or they
        were given the same batch; `anchors_differ`: copies of the anchor that should be
        the same are not.

    Raises:
      ValueError: if there are no counters, or several.

    Warns:
      UserWarning: if `displaced` has counted, but for what `replicas.repair` may mend.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = cd.local_muon(0.01).init({"kernel": jnp.ones((2, 2))})
      >>> print(read(state))
      share              0.00%
      steps              0
      syncs              0
      sync_rate          0.00%
      since              0
      replicas           1
      votes              0
      bytes              0
      synchronous_bytes  0
    """
    counters = observe(opt_state)
    warn_of_displaced(counters)
    replicas = counters.value.shape[0] if counters.value.ndim else 1
    found = jax.tree.map(_own_rows, counters)
    steps, syncs, votes = int(found.steps), int(found.syncs), int(found.votes)
    costs = Costs(*[high * _WORD + low for high, low in found.costs.tolist()])
    others = replicas - 1
    averaged = syncs * costs.averaged + votes * costs.number
    gathered = syncs * (costs.gathered + costs.number)
    sent = round(2 * others * averaged / replicas + others * gathered)
    synchronous = round(2 * others * steps * costs.gradients / replicas)
    report = Report(
        share=sent / synchronous if synchronous else 0.0,
        steps=steps,
        syncs=syncs,
        sync_rate=syncs / steps if steps else 0.0,
        since=int(found.since),
        replicas=replicas,
        votes=votes,
        bytes=sent,
        synchronous_bytes=synchronous,
    )
    value = np.atleast_1d(found.value)
    if votes or found.threshold != 0 or np.any(value != 0):
        # A replica's NaN is its own.
        worst = int(np.argmax(np.where(np.isnan(value), -math.inf, value)))
        layer = int(np.atleast_1d(found.layer)[worst])
        if params is not None and layer >= 0:
            layer, _ = _trees.leaves_with_path(params)[layer]
        report |= {
            "value": _as_number(value[worst]),
            "threshold": _as_number(found.threshold),
            "layer": None if layer == -1 else layer,
        }
    for name in ("nonfinite", "zeroed", "excluded", "absent", "displaced"):
        counts = np.atleast_1d(getattr(found, name)).tolist()
        if any(counts):
            report[name] = counts
    anchors = {*np.atleast_1d(found.anchor_checksum).tolist()}
    # 0 is a replica that has not moved, as on the first step of a warm-up from 0.
    moved = collections.Counter(np.atleast_1d(found.moved_checksum).tolist())
    if alike := sum(n for value, n in moved.items() if value and n > 1):
        report["alike"] = alike
    if len(anchors) > 1:
        report["anchors_differ"] = True
    return report


def warn_of_displaced(state: Any) -> None:
    """Warns of a state whose parameters were changed behind the optimizer.

    For who prints no metrics. At the line that called the caller; the text is always
    the same, so Python shows it once for each. A replica that was excluded may have
    been mended by `replicas.repair`.
    """
    for counters in _trees.nodes_of(Counters, state):
        # nnx has variables.
        counts = jax.tree.leaves((counters.displaced, counters.excluded))
        if any(isinstance(x, Tracer) for x in counts):
            continue
        displaced, excluded = map(_own_rows, counts)
        if np.any(displaced > excluded):
            warnings.warn(
                "Parameters were changed after the optimizer's update (displaced in "
                "metrics.read), which the next sync takes for training. Put what "
                "follows the optimizer into inner or before=, and give new parameters "
                "to tx.init.",
                stacklevel=3,
            )


def _as_number(x: Any) -> float:
    """0.3 for float32 0.3, and infinity for the largest, which stands for it."""
    return math.inf if x >= np.finfo(np.float32).max else float(str(x))


def _own_rows(x: Any) -> np.ndarray:
    """An array as NumPy's; of rows in several processes, those of this one."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.ndim == 0:
        return np.asarray(jax.device_get(x))
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    # The devices of one replica hold the same rows.
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
