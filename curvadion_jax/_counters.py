"""The counters in the state of `adaptive_sync`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _paths
from curvadion_jax._interfaces import Decision, Payload

WORD = 2**30
# Of an `AdaptiveSyncState`.
_STATE_FIELDS = ("inner_state", "trigger_state", "sync_state", "metrics")


class Faults(NamedTuple):
    """This replica's events on one step; see `SyncMetrics` for the names."""

    zeroed: jax.Array
    excluded: jax.Array
    absent: jax.Array
    weight: jax.Array


class SyncMetrics(NamedTuple):
    """Counters of what happened so far; `curvadion_jax.metrics.read` reads them.

    Bytes take two words each: an int32 overflows at one sync of 500 million parameters.

    Attributes:
      steps, syncs: int32[], steps taken, and sync steps among them.
      local_steps: int32[], steps since the last sync, or since the start.
      votes: int32[], steps on which replicas reduced their requests to one decision.
      synced: bool[], whether the last step synchronised.
      value, threshold, layer: of the trigger's last `triggers.Decision` on this
        replica. Replica-varying.
      nonfinite, zeroed: int32[], steps on which this replica's gradients were not
        finite, or updates of finite gradients. Replica-varying.
      excluded, absent: int32[], syncs in which this replica had nothing finite to
        contribute, or no weight. Replica-varying.
      last_excluded: int32[], number of the step of the last sync from which it was
        excluded, -1 if none. Replica-varying.
      weight: float32[], how much this replica counted in the last sync, 1 if all
        counted alike, 0 if it took no part. Replica-varying.
      sent: int32[2, 2], bytes sent so far as [[high, low], [high, low]] in base 2^30:
        those that were averaged, and those put into all-gathers (see
        `curvadion_jax.compressors.Payload`).
      synchronous: int32[2], bytes of float32 gradients of all steps, likewise.
    """

    steps: jax.Array
    syncs: jax.Array
    local_steps: jax.Array
    votes: jax.Array
    synced: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array
    nonfinite: jax.Array
    zeroed: jax.Array
    excluded: jax.Array
    absent: jax.Array
    last_excluded: jax.Array
    weight: jax.Array
    sent: jax.Array
    synchronous: jax.Array


def initial() -> SyncMetrics:
    """The counters before the first step."""
    zero, never = jnp.zeros([], jnp.int32), jnp.full([], -1, jnp.int32)
    nan = jnp.full([], jnp.nan, jnp.float32)
    return SyncMetrics(*[zero] * len(SyncMetrics._fields))._replace(
        synced=jnp.zeros([], jnp.bool_),
        value=nan,
        threshold=nan,
        layer=never,
        last_excluded=never,
        weight=jnp.zeros([], jnp.float32),
        sent=jnp.zeros((2, 2), jnp.int32),
        synchronous=jnp.zeros(2, jnp.int32),
    )


def counter_paths(names: Iterable[_paths.Names]) -> list[_paths.Names]:
    """Finds all counters of optimizers, among the names of a tree's leaves.

    It goes by names and not by type: `flax.nnx.split` makes dictionaries of named
    tuples. All names must be there: a state may have `metrics` with its own `steps`.
    """
    known, fields = dict.fromkeys(names), SyncMetrics._fields
    found = [each[:-1] for each in known if each[-1:] == ("steps",)]
    return [path for path in found if all((*path, x) in known for x in fields)]


def optimizer_paths(tree: Any) -> list[_paths.Names]:
    """Finds all states of `adaptive_sync` in a tree, by their counters."""
    known = dict.fromkeys(names for names, _ in _paths.leaves_with_names(tree))
    found = [path[:-1] for path in counter_paths(known) if path[-1:] == ("metrics",)]
    # Where there are types, a copy of counters can be told from a state.
    is_state = lambda node: getattr(node, "_fields", ()) == _STATE_FIELDS
    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_state)
    typed = {_paths.names_of(path) for path, node in nodes if is_state(node)}
    return [path for path in found if path in typed] or found


def inside(names: _paths.Names, optimizers: Iterable[_paths.Names]) -> _paths.Names:
    """The path of a leaf inside the state of an optimizer; () if it lies in none."""
    for path in optimizers:
        below = names[len(path) :]
        if names[: len(path)] == path and set(below[:1]) <= {*_STATE_FIELDS}:
            return below
    return ()


def is_within(
    names: _paths.Names, optimizers: Iterable[_paths.Names], *fields: str
) -> bool:
    """Whether a leaf lies in one of these fields, such as `sync_state/anchor`."""
    path = f"{'/'.join(inside(names, optimizers))}/"
    return any(path.startswith(f"{field}/") for field in fields)


def update(
    old: SyncMetrics,
    decision: Decision,
    *,
    voters: int,
    synced: jax.Array | bool,
    finite: jax.Array,
    faults: Faults,
    payload: Payload,
    gradient_bytes: int,
) -> SyncMetrics:
    """Counts a step.

    `finite` tells whether this replica's gradients were finite, `payload` what a sync
    sends, `gradient_bytes` the bytes of gradients in float32, and `voters` how many
    devices of this replica reduce an int32, the vote.
    """
    synced = jnp.asarray(synced)
    sent = jnp.where(synced, charged(old.sent, payload), old.sent)
    if voters:
        sent = charged(sent, Payload(averaged=4 * voters))
    return SyncMetrics(
        steps=jnp.asarray(optax.safe_increment(old.steps)),
        syncs=_counted(old.syncs, synced),
        local_steps=jnp.where(synced, 0, optax.safe_increment(old.local_steps)),
        votes=_counted(old.votes, voters > 0),
        synced=synced,
        value=jnp.asarray(decision.value, jnp.float32),
        threshold=jnp.asarray(decision.threshold, jnp.float32),
        layer=jnp.asarray(decision.layer, jnp.int32),
        nonfinite=_counted(old.nonfinite, ~finite),
        zeroed=_counted(old.zeroed, faults.zeroed),
        excluded=_counted(old.excluded, faults.excluded),
        absent=_counted(old.absent, faults.absent),
        last_excluded=jnp.where(faults.excluded, old.steps, old.last_excluded),
        weight=jnp.where(synced, faults.weight, old.weight),
        sent=sent,
        synchronous=_plus(old.synchronous, jnp.array(divmod(gradient_bytes, WORD))),
    )


def charged(sent: jax.Array, payload: Payload) -> jax.Array:
    """Adds the bytes of a payload to `SyncMetrics.sent`."""
    words = [divmod(number, WORD) for number in payload]
    return _plus(sent, jnp.array(words, jnp.int32))


def _counted(count: jax.Array, event: jax.Array | bool) -> jax.Array:
    return jnp.where(event, optax.safe_increment(count), count)


def _plus(words: jax.Array, more: jax.Array) -> jax.Array:
    """Adds numbers [..., 2] in base 2^30."""
    low = words[..., 1] + more[..., 1].astype(jnp.int32)
    high = words[..., 0] + more[..., 0].astype(jnp.int32) + low // WORD
    return jnp.stack([high, low % WORD], axis=-1)
