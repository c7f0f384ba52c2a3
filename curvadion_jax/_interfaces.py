"""The interfaces of triggers and synchronizers.

On every step of a replica a :class:`Trigger` turns an :class:`Observation` into a
:class:`Decision`. On a sync step a :class:`Synchronizer` is given the replica's
:class:`LocalStep` and the :class:`Group` of all replicas. Neither knows the axis.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax._collectives import Group
from curvadion_jax._matrices import MatrixView
from curvadion_jax._trees import wide

Views = Mapping[str, MatrixView | None]
"""Path of a parameter -> how it is seen as matrices; None if it is not a matrix."""


class Payload(NamedTuple):
    """Bytes of one sync. Payloads add up.

    Attributes:
      averaged: bytes in all-reduces. One of N replicas sends 2 (N - 1) / N times that.
      gathered: bytes in all-gathers, of each replica. It sends N - 1 times as many.
    """

    averaged: int = 0
    gathered: int = 0

    # A tuple's own method would concatenate them.
    def __add__(self, other: "Payload") -> "Payload":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Payload(self.averaged + other.averaged, self.gathered + other.gathered)

    def as_averaged(self, replicas: int) -> float:
        """The size of an all-reduce that would cost each replica the same bytes."""
        return self.averaged + self.gathered * replicas / 2


class Observation(NamedTuple):
    """What a trigger sees of its own replica on every step.

    Attributes:
      gradients: this step's, tree of the parameters; zeros where `finite` is False.
      inner_state: state of the inner optimizer before this step.
      params: parameters before this step.
      views: path of a parameter -> how it is seen as matrices, or None.
      next_inner_state: function without arguments: the inner optimizer's state after
        a local step, with its momentum before error feedback.
      steps: int32[], steps taken before this one.
      syncs: int32[], sync steps among them.
      local_steps: int32[], local steps since the last sync, or since the start.
      anchor: the parameters that all replicas had after the last sync, tree of the
        parameters; () where the synchronizer keeps none.
      sync_cost: float, bytes of a sync over those of a float32 gradient all-reduce.
      finite: bool[], whether the gradients are finite.
    """

    gradients: optax.Updates = ()
    inner_state: optax.OptState = ()
    params: optax.Params = ()
    views: Views = MappingProxyType({})
    next_inner_state: Callable[[], optax.OptState] = tuple
    steps: jax.Array | int = 0
    syncs: jax.Array | int = 0
    local_steps: jax.Array | int = 0
    anchor: optax.Params = ()
    sync_cost: float = 1.0
    finite: jax.Array | bool = True


class Decision(NamedTuple):
    """The result of a trigger on one step; made by `triggers.decision`.

    Attributes:
      fire: bool[], whether this replica requests a sync on this step.
      value: float32[], the measured value; NaN if nothing was measured.
      threshold: float32[], the threshold of the value; NaN if nothing was measured.
      layer: int32[], index of the parameter with the largest value, in the order of
        the parameters' leaves; -1 if it belongs to no parameter.
    """

    fire: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array


class Trigger(NamedTuple):
    """Decides when replicas synchronise.

    `due` says on which steps the replicas decide. The host can compute it, and on all
    other steps nothing is sent. `decide` measures on the devices. If a decision is due,
    the request of any replica synchronises all. Without `decide` each due step syncs.

    Attributes:
      init: (params, inner_state, views) -> trigger state, a tree of arrays; called
        once, outside `shard_map` and possibly on abstract values.
      decide: (observation, trigger state) -> (Decision, trigger state); called on
        every step on every replica, traced, before anything is sent. It must not
        communicate (this is checked). None if `due` alone decides.
      due: (steps taken before this one, `Observation.sync_cost`) -> whether a decision
        is due, for Python ints and int32[] alike. None means on every step.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import triggers
      >>> def decide(observation, last):  # after steps 3, 7, 15, 31, ...
      ...     fire = observation.steps >= 2 * last
      ...     last = jnp.where(fire, observation.steps + 1, last)
      ...     return triggers.decision(fire), last
      >>> doubling = Trigger(lambda *_: jnp.ones([], int), decide)
      >>> last, fired = jnp.ones([], int), []
      >>> for step in range(8):
      ...     answer, last = doubling.decide(Observation(steps=step), last)
      ...     fired.append(int(answer.fire))
      >>> fired
      [0, 0, 1, 0, 0, 0, 1, 0]
    """

    init: Callable[[optax.Params, optax.OptState, Views], Any]
    decide: Callable[[Observation, Any], tuple[Decision, Any]] | None
    due: Callable[[Any, float], Any] | None = None


class SyncState(NamedTuple):
    """State of a synchronizer, which changes at syncs only.

    `replicas.anchor`, `repair`, `resize` and `offload` copy, average and read an array
    by the field that it is in.

    Attributes:
      anchor: the parameters after the last sync; the same on all replicas.
      common: what else is the same on all replicas.
      residual: error feedback, what this replica has not contributed yet, already
        multiplied by its weight. Replica-varying; zeros in copies that `repair` makes.
    """

    anchor: Any = ()
    common: Any = ()
    residual: Any = ()


class Synchronizer(NamedTuple):
    """Decides what replicas send at a sync, and how it changes them.

    Attributes:
      init: (params, inner_state, views) -> :class:`SyncState`; called once, outside
        `shard_map` and possibly on abstract values.
      sync: (local step, sync state, group) -> (updates, inner state, sync state);
        called on sync steps only. Without an anchor it keeps equal replicas equal.
      payload: (params, inner_state, views, layout) -> the `Payload` of one sync (see
        `curvadion_jax.compressors`), from shapes, and from how they lie on devices.
      after_local_step: whether `sync` follows the local step; else it replaces it.

    Example:
      >>> from curvadion_jax.compressors import exact
      >>> def sync(local, state, group):
      ...     signs = jax.tree.map(jnp.sign, local.gradients)
      ...     mean = local.mean(signs, group)
      ...     return *local.take(mean, local.inner_state), state
      >>> average_signs = Synchronizer(
      ...     init=lambda params, inner_state, views: SyncState(),
      ...     sync=sync,
      ...     payload=lambda x, _, __, layout: exact().payload_by_device(x, layout),
      ... )
    """

    init: Callable[[optax.Params, optax.OptState, Views], SyncState]
    sync: Callable[..., tuple[optax.Updates, optax.OptState, SyncState]]
    payload: Callable[..., Payload]
    after_local_step: bool = False


class LocalStep(NamedTuple):
    """One replica's step, and its part in this sync.

    Attributes:
      inner_state: state of the inner optimizer; before the step, or after it for
        synchronizers with `after_local_step`.
      params: this replica's parameters before the step.
      views: path of a parameter -> how it is seen as matrices, or None.
      gradients: this replica's, tree of the parameters; () with `after_local_step`.
      take: ``(gradients, inner_state, **extra_args)`` -> (updates, inner state after
        the step), the inner optimizer's update; None with `after_local_step`.
      updates: with `after_local_step` those of the step that was taken.
      weight: float32[], weight of this replica in the means of this sync; 0 if it
        takes no part. Weights have a mean of 1 over the replicas (0 if none takes
        part), so `group.mean` of weight times x is the weighted mean. Replica-varying.
      expected: float32[], replicas that take part over those that are not excluded.
        Multiply a mean by it if absent replicas will add their part later.
      healthy: bool[], whether all that this replica has is finite. Replica-varying.
    """

    inner_state: optax.OptState
    params: optax.Params
    views: Views
    gradients: optax.Updates = ()
    take: Any = None
    updates: optax.Updates = ()
    weight: jax.Array | float = 1.0
    expected: jax.Array | float = 1.0
    healthy: jax.Array | bool = True

    @property
    def present(self) -> jax.Array:
        """Whether this replica takes part, bool[]."""
        return jnp.asarray(self.weight) > 0

    def weighted(self, tree: Any) -> Any:
        """Multiplies arrays by the weight, in at least float32.

        The result is zero, whatever is in the tree, if this replica takes no part.
        """

        def contribution(x):
            x = wide(x)
            return jnp.where(self.present, jnp.asarray(self.weight, x.dtype) * x, 0)

        return jax.tree.map(contribution, tree)

    def mean(self, tree: Any, group: Group) -> Any:
        """The weighted mean over participating replicas, in the dtypes of the tree."""
        means = group.mean(self.weighted(tree))
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)
