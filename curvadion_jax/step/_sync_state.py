"""The state of `adaptive_sync`: what is common, what are rows, and what is counted."""

from __future__ import annotations

from typing import Any, NamedTuple

from curvadion_jax import metrics


class Common(NamedTuple):
    """What is the same on all replicas: arrays without an axis of replicas.

    Attributes:
      anchor: the parameters that all replicas had after the last sync; () where the
        synchronizer keeps none.
      sync_state: what else the synchronizer keeps, such as the outer optimizer's state.
      trigger_state: what the trigger keeps, such as a threshold that it adapts.
    """

    anchor: Any
    sync_state: Any
    trigger_state: Any


class Rows(NamedTuple):
    """What each replica has of its own: arrays [R, ...].

    Attributes:
      before_state: state of `before`.
      inner_state: state of the inner optimizer.
      remembered: what the trigger remembers of the replica.
      residual: what the replica has not sent yet, already multiplied by its weight; ()
        without error feedback.
      weight: the sum of the replica's weights since the last sync; () if a sync
        averages what belongs to one step.
    """

    before_state: Any
    inner_state: Any
    remembered: Any
    residual: Any
    weight: Any


class AdaptiveSyncState(NamedTuple):
    """State of `adaptive_sync`.

    Attributes:
      common: what is the same on all replicas: `anchor`, `sync_state` and
        `trigger_state`.
      rows: what each replica has of its own, [R, ...]: `before_state`, `inner_state`,
        `remembered`, `residual` and `weight`.
      counters: :class:`curvadion_jax.metrics.Counters`, some of either kind.
    """

    common: Common
    rows: Rows
    counters: metrics.Counters


def check_state(state: Any) -> None:
    """Rejects a state of another class, such as a checkpoint's dictionary."""
    if not isinstance(state, AdaptiveSyncState):
        raise TypeError(
            f"The optimizer state is a {type(state).__name__}, and no "
            "AdaptiveSyncState. Give what init returned; a checkpoint restored without "
            "a target is made of dictionaries, so restore it into such a state."
        )
