"""The counters that `adaptive_sync` keeps in its state."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax._payload import Payload
from curvadion_jax.triggers import Decision

WORD = 2**30


class Presence(NamedTuple):
    """Who did not take part in a sync, and why.

    Attributes:
      left_out: bool[], this replica, which had nothing finite to bring.
      absent: bool[], this replica, which was given no weight.
      empty: bool[], all.
      over: bool[], whether it was a sync all the same, after which those who missed it
        need not ask for another.
    """

    left_out: jax.Array
    absent: jax.Array
    empty: jax.Array
    over: jax.Array


def nobody_missing() -> Presence:
    """That of a step without a sync."""
    no = jnp.zeros([], jnp.bool_)
    return Presence(no, no, no, no)


class SyncMetrics(NamedTuple):
    """What happened so far; small, and a part of the state like any other.

    Events are counted, never bytes: an int32 byte counter would overflow after one
    sync of a model of 500 million parameters. `curvadion_jax.metrics.read` multiplies
    on the host.

    Attributes:
      steps: int32[], steps taken.
      syncs: int32[], synchronised steps among them.
      variant_syncs: int32[V], how many of the syncs were of each variant of the
        synchronizer; most have one.
      quiet_steps: int32[], steps since the last sync, or since the start.
      asked: int32[], steps on which replicas reduced their flag to decide.
      synced: bool[], whether the last step synchronised.
      value: float32[], the trigger's value on this replica on the last step, NaN if
        it has none. Replica-varying.
      threshold: float32[], what the value was compared with.
      layer: int32[], index of the parameter with the largest value on this replica,
        -1 if none. Replica-varying.
      skipped: int32[], steps that this replica did not take, because its gradients
        were not finite. Replica-varying.
      skipped_in_a_row: int32[], how many of them were the last ones. Replica-varying.
      skipped_at: int32[], number of the last of them, -1 if none. Replica-varying.
      left_out: int32[], syncs that this replica was left out of, because what it had
        was not finite, or it had nothing. Replica-varying.
      left_out_in_a_row: int32[], how many of them were the last ones. Replica-varying.
      left_out_at: int32[], number of the step of the last of them, -1 if none. Where
        syncs average gradients or factors, of the last that others took part in.
        Replica-varying.
      absent: int32[], syncs in which it had something sound, and no weight.
        Replica-varying.
      absent_at: int32[], as `left_out_at`. Replica-varying.
      empty: int32[], syncs that nobody took part in; they changed nothing.
      joined: float32[], 1 if the last step synchronised and this replica took part,
        else 0; of replicas that `replicas.resize` made one of, the mean.
        Replica-varying.
      moved: int32[], syncs after which this replica's parameters were not where they
        had been left, on the next step. A distance of half a rounding of all parameters
        is not seen: of their norm 6e-8 in float32, 0.05% in float16, 0.4% in bfloat16.
        Nor is any after a sync that the replica missed, or one of gradients or factors,
        which leaves parameters nowhere in particular. Replica-varying.
      moved_in_a_row: int32[], how many of them were the last ones. Replica-varying.
      sync_payload: int32[2], bytes that a sync averages over replicas, as
        [high, low] in base 2^30; int32[V, 2] for V > 1 variants.
      gathered_payload: int32[2], bytes that a replica sends to each of the others at
        a sync, likewise.
      gradient_payload: int32[2], bytes of all gradients in float32, likewise.

    Example:
      >>> state = initial([Payload(averaged=12)], gradient_payload=2**31 + 4)
      >>> int(state.syncs), state.gradient_payload.tolist()
      (0, [2, 4])
    """

    steps: jax.Array
    syncs: jax.Array
    variant_syncs: jax.Array
    quiet_steps: jax.Array
    asked: jax.Array
    synced: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    skipped_at: jax.Array
    left_out: jax.Array
    left_out_in_a_row: jax.Array
    left_out_at: jax.Array
    absent: jax.Array
    absent_at: jax.Array
    empty: jax.Array
    joined: jax.Array
    moved: jax.Array
    moved_in_a_row: jax.Array
    sync_payload: jax.Array
    gathered_payload: jax.Array
    gradient_payload: jax.Array


def _words(*numbers: int) -> jax.Array:
    """[high, low] of one number, a row each of several."""
    rows = jnp.array([divmod(number, WORD) for number in numbers], jnp.int32)
    return rows[0] if len(numbers) == 1 else rows


def initial(payloads: Sequence[Payload], gradient_payload: int) -> SyncMetrics:
    """The counters before the first step.

    Args:
      payloads: of a sync of each variant.
      gradient_payload: bytes of all gradients.
    """
    zero, nan = jnp.zeros([], jnp.int32), jnp.full([], jnp.nan, jnp.float32)
    return SyncMetrics(
        steps=zero,
        syncs=zero,
        variant_syncs=jnp.zeros(len(payloads), jnp.int32),
        quiet_steps=zero,
        asked=zero,
        synced=jnp.zeros([], jnp.bool_),
        value=nan,
        threshold=nan,
        layer=jnp.full([], -1, jnp.int32),
        skipped=zero,
        skipped_in_a_row=zero,
        skipped_at=jnp.full([], -1, jnp.int32),
        left_out=zero,
        left_out_in_a_row=zero,
        left_out_at=jnp.full([], -1, jnp.int32),
        absent=zero,
        absent_at=jnp.full([], -1, jnp.int32),
        empty=zero,
        joined=jnp.zeros([], jnp.float32),
        moved=zero,
        moved_in_a_row=zero,
        sync_payload=_words(*(payload.averaged for payload in payloads)),
        gathered_payload=_words(*(payload.gathered for payload in payloads)),
        gradient_payload=_words(gradient_payload),
    )


def following(
    old: SyncMetrics,
    decision: Decision,
    asked: jax.Array | bool,
    which: jax.Array,
    usable: jax.Array,
    presence: Presence,
    was_moved: jax.Array,
) -> SyncMetrics:
    """The counters after a step.

    Args:
      old: those before it.
      decision: of this replica's trigger.
      asked: whether replicas reduced their answers.
      which: 0 if the step was quiet, else 1 + the variant of the sync.
      usable: whether this replica's gradients were finite.
      presence: who did not take part in the sync.
      was_moved: whether this replica's parameters were not where the sync of the step
        before had left them.
    """
    synced = which > 0
    missed = presence.left_out | presence.absent | presence.empty
    variants = 1 + jnp.arange(old.variant_syncs.size, dtype=jnp.int32)

    def counted(count, event):
        return jnp.where(event, optax.safe_increment(count), count)

    def at(before, missing):
        return jnp.where(missing & presence.over, old.steps, before)

    return old._replace(
        steps=optax.safe_increment(old.steps),
        syncs=counted(old.syncs, synced),
        variant_syncs=counted(old.variant_syncs, variants == which),
        quiet_steps=jnp.where(synced, 0, optax.safe_increment(old.quiet_steps)),
        asked=counted(old.asked, asked),
        synced=synced,
        value=jnp.asarray(decision.value, jnp.float32),
        threshold=jnp.asarray(decision.threshold, jnp.float32),
        layer=jnp.asarray(decision.layer, jnp.int32),
        skipped=counted(old.skipped, ~usable),
        skipped_in_a_row=jnp.where(
            usable, 0, optax.safe_increment(old.skipped_in_a_row)
        ),
        skipped_at=jnp.where(usable, old.skipped_at, old.steps),
        left_out=counted(old.left_out, presence.left_out),
        left_out_in_a_row=jnp.where(
            synced & ~presence.left_out,
            0,
            counted(old.left_out_in_a_row, presence.left_out),
        ),
        left_out_at=at(old.left_out_at, presence.left_out),
        absent=counted(old.absent, presence.absent),
        absent_at=at(old.absent_at, presence.absent),
        empty=counted(old.empty, presence.empty),
        joined=(synced & ~missed).astype(jnp.float32),
        moved=counted(old.moved, was_moved),
        moved_in_a_row=jnp.where(
            (old.joined == 1) & ~was_moved, 0, counted(old.moved_in_a_row, was_moved)
        ),
    )
