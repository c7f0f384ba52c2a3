"""The counters that `adaptive_sync` keeps in its state."""

import functools
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _paths
from curvadion_jax._payload import FLAG, Payload
from curvadion_jax._protocols import Decision

WORD = 2**30


class Faults(NamedTuple):
    """What kept this replica from a step, or from a sync; see `_faults`.

    Attributes:
      skipped: bool[], its gradients were not finite.
      contained: bool[], of finite gradients the inner optimizer made updates that are
        not.
      excluded: bool[], it had nothing finite to bring to a sync.
      absent: bool[], it was given no weight.
      empty: bool[], nobody took part.
      closed: bool[], whether it was a sync all the same, after which those who missed
        it need not request another.
    """

    skipped: jax.Array
    contained: jax.Array
    excluded: jax.Array
    absent: jax.Array
    empty: jax.Array
    closed: jax.Array


def no_faults() -> Faults:
    """Those of a local step in which all is well."""
    return Faults(*[jnp.zeros([], jnp.bool_)] * len(Faults._fields))


class Tally(NamedTuple):
    """How often something happened to this replica. Replica-varying.

    Attributes:
      total: int32[], how often.
      in_a_row: int32[], how many of the last times it could have happened it did.
      last: int32[], number of the step of the last time, -1 if never. Of syncs that
        average gradients or factors, the last that others took part in.

    Example:
      >>> zero_tally().last.tolist()
      -1
    """

    total: jax.Array
    in_a_row: jax.Array
    last: jax.Array


def zero_tally() -> Tally:
    zero = jnp.zeros([], jnp.int32)
    return Tally(zero, zero, jnp.full([], -1, jnp.int32))


class SyncMetrics(NamedTuple):
    """What happened so far; small, and a part of the state like any other.

    `curvadion_jax.metrics.read` makes it readable. Bytes are added up as they are sent,
    in two words each, since an int32 would overflow after one sync of a model of 500
    million parameters.

    Attributes:
      steps: int32[], steps taken.
      syncs: int32[], sync steps among them; with a delay, those on which one began.
      local_steps: int32[], steps since the last sync, or since the start.
      asked: int32[], steps on which replicas reduced their requests to one decision.
      synced: bool[], whether the last step synchronised.
      value: float32[], the trigger's value on this replica on the last step, NaN if
        it has none. Replica-varying.
      threshold: float32[], what the value was compared with. Replica-varying.
      layer: int32[], index of the parameter with the largest value on this replica,
        -1 if none. Replica-varying.
      skipped: steps that this replica did not take, because its gradients were not
        finite.
      contained: steps on which the inner optimizer returned updates that were not
        finite, of finite gradients; their bad elements were set to zero.
      excluded: syncs from which this replica was excluded, because what it had was not
        finite.
      absent: syncs in which it had something finite, and no weight.
      empty: int32[], syncs that nobody took part in; they changed nothing.
      sent: int32[2, 2], bytes sent so far as [[high, low], [high, low]] in base 2^30:
        those that were averaged, and those put into all-gathers (see
        `curvadion_jax.compressors.Payload`).
      synchronous: int32[2], bytes of float32 gradients of all steps, likewise.

    Example:
      >>> counters = initial()
      >>> int(counters.syncs), counters.sent.tolist()
      (0, [[0, 0], [0, 0]])
    """

    steps: jax.Array
    syncs: jax.Array
    local_steps: jax.Array
    asked: jax.Array
    synced: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array
    skipped: Tally
    contained: Tally
    excluded: Tally
    absent: Tally
    empty: jax.Array
    sent: jax.Array
    synchronous: jax.Array


def initial() -> SyncMetrics:
    """The counters before the first step."""
    zero, nan = jnp.zeros([], jnp.int32), jnp.full([], jnp.nan, jnp.float32)
    return SyncMetrics(
        steps=zero,
        syncs=zero,
        local_steps=zero,
        asked=zero,
        synced=jnp.zeros([], jnp.bool_),
        value=nan,
        threshold=nan,
        layer=jnp.full([], -1, jnp.int32),
        skipped=zero_tally(),
        contained=zero_tally(),
        excluded=zero_tally(),
        absent=zero_tally(),
        empty=zero,
        sent=jnp.zeros((2, 2), jnp.int32),
        synchronous=jnp.zeros(2, jnp.int32),
    )


@functools.cache
def _names() -> list[_paths.Names]:
    return [names for names, _ in _paths.leaves_with_names(jax.eval_shape(initial))]


def ways(names: Iterable[_paths.Names]) -> list[_paths.Names]:
    """The ways to all counters of optimizers, among the names of a tree's leaves.

    By names and not by type: `flax.nnx.split` makes dictionaries of named tuples. By
    all of them, since a state may have `metrics` with a count of `steps` of its own.
    """
    known, last = dict.fromkeys(names), _names()[0]
    found = [each[: -len(last)] for each in known if each[-len(last) :] == last]
    return [way for way in found if all((*way, *each) in known for each in _names())]


def optimizers(names: Iterable[_paths.Names]) -> list[_paths.Names]:
    """The ways to all states of `adaptive_sync`, which keep their counters."""
    return [way[:-1] for way in ways(names) if way[-1:] == ("metrics",)]


def is_within(
    names: _paths.Names, states: Iterable[_paths.Names], fields: Container[str]
) -> bool:
    """Whether a leaf lies in one of these fields of one of the states."""
    return any(
        names[: len(way)] == way and len(names) > len(way) and names[len(way)] in fields
        for way in states
    )


def following(
    old: SyncMetrics,
    decision: Decision,
    asked: jax.Array | bool,
    which: jax.Array | int,
    ended: jax.Array | int,
    faults: Faults,
    payloads: Sequence[Payload],
    gradient_bytes: int,
) -> SyncMetrics:
    """The counters after a step.

    Args:
      old: those before it.
      decision: of this replica's trigger.
      asked: whether replicas reduced their requests.
      which: 0 for a local step, else 1 + the variant of the sync that begins.
      ended: the same for the sync that ends: `which`, or with a delay one of before.
      faults: what kept this replica from the step, or from the sync.
      payloads: what a sync of each variant sends.
      gradient_bytes: those of all gradients in float32.
    """
    synced, over = jnp.asarray(which > 0), jnp.asarray(ended > 0)
    closed = jnp.where(faults.closed, old.steps, -1)
    sizes = [Payload(), *payloads]
    sent = _plus(old.sent, _words(sizes)[ended])
    sent = jnp.where(asked, _plus(sent, _words([FLAG])[0]), sent)
    return SyncMetrics(
        steps=jnp.asarray(optax.safe_increment(old.steps)),
        syncs=_counted(old.syncs, synced),
        local_steps=jnp.where(synced, 0, optax.safe_increment(old.local_steps)),
        asked=_counted(old.asked, asked),
        synced=synced,
        value=jnp.asarray(decision.value, jnp.float32),
        threshold=jnp.asarray(decision.threshold, jnp.float32),
        layer=jnp.asarray(decision.layer, jnp.int32),
        skipped=_tallied(old.skipped, faults.skipped, True, old.steps),
        contained=_tallied(old.contained, faults.contained, True, old.steps),
        excluded=_tallied(old.excluded, faults.excluded, over, closed),
        absent=_tallied(old.absent, faults.absent, over, closed),
        empty=_counted(old.empty, faults.empty),
        sent=sent,
        synchronous=_plus(old.synchronous, jnp.array(divmod(gradient_bytes, WORD))),
    )


def charged(sent: jax.Array, payload: Payload) -> jax.Array:
    """`SyncMetrics.sent` with the bytes of one more payload."""
    return _plus(sent, _words([payload])[0])


def _counted(count: jax.Array, event: jax.Array | bool) -> jax.Array:
    return jnp.where(event, optax.safe_increment(count), count)


def _tallied(old: Tally, event, possible, step: jax.Array) -> Tally:
    in_a_row = jnp.where(event, optax.safe_increment(old.in_a_row), 0)
    return Tally(
        _counted(old.total, event),
        jnp.where(possible, in_a_row, old.in_a_row),
        jnp.where(event & (step >= 0), step, old.last),
    )


def _words(payloads: Sequence[Payload]) -> jax.Array:
    """Bytes as [high, low] in base 2^30: int32[payloads, 2, 2]."""
    pairs = [[divmod(number, WORD) for number in payload] for payload in payloads]
    return jnp.array(pairs, jnp.int32)


def _plus(words: jax.Array, more: jax.Array) -> jax.Array:
    """The sum of numbers [..., 2] in base 2^30."""
    low = words[..., 1] + more[..., 1].astype(jnp.int32)
    high = words[..., 0] + more[..., 0].astype(jnp.int32) + low // WORD
    return jnp.stack([high, low % WORD], axis=-1)
