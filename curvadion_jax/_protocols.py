"""The small interfaces between the parts: who is asked what, and with which arrays.

On every step of a replica a :class:`Trigger` is given an :class:`Observation` and
answers with a :class:`Decision`. On a sync step a :class:`Synchronizer` is given the
replica's `LocalStep` (`_local_step`) and the :class:`Group` of all replicas. None of
them knows an axis.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from curvadion_jax._layout import Layout
from curvadion_jax._matrices import MatrixView
from curvadion_jax._payload import Payload

Views = Mapping[str, MatrixView | None]
"""Path of a parameter -> how it is seen as matrices; None if it is not a matrix."""


class Observation(NamedTuple):
    """What a trigger sees on every step, all of it this replica's own.

    The fields have defaults so that a trigger can be asked by hand, as in its tests.

    Attributes:
      gradients: this step's gradients, tree of the parameters; zeros where `usable` is
        False.
      usable: bool[], whether the gradients are finite. Where not, the replica does not
        take this step; its answer is heard all the same.
      inner_state: state of the inner optimizer before this step.
      params: parameters before this step.
      views: path of a parameter -> how it is seen as matrices, or None.
      next_inner_state: function without arguments that returns the state that the
        inner optimizer would have after a local step, with its momentum before error
        feedback.
      steps: int32[], steps taken before this one.
      syncs: int32[], sync steps among them.
      local_steps: int32[], local steps since the last sync, or since the start.
      anchor: the parameters that all replicas had after the last sync, tree of the
        parameters; () where the synchronizer keeps none.
      sync_cost: Python float, the bytes of one sync over those of an all-reduce of
        all gradients in float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import triggers
      >>> def decide(seen: Observation) -> Decision:
      ...     norm = optax.tree.norm(seen.gradients)
      ...     return triggers.decision(norm > 10, value=norm, threshold=10)
      >>> on_large_gradients = triggers.stateless(decide)
      >>> seen = Observation(gradients={"w": jnp.array([12.0, 16.0])})
      >>> float(on_large_gradients.decide(seen, ())[0].value)
      20.0
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
    usable: jax.Array | bool = True


class Decision(NamedTuple):
    """What a trigger answers; made by `triggers.decision`.

    Attributes:
      fire: bool[], whether this replica requests a sync on this step.
      value: float32[], what was compared with the threshold; NaN where nothing was.
      threshold: float32[], what it was compared with; NaN where nothing was.
      layer: int32[], index of the parameter, in the order of the parameters' leaves,
        whose value was the largest; -1 where no parameter is meant.

    Example:
      >>> from curvadion_jax import triggers
      >>> answer = triggers.decision(True, value=0.5, threshold=0.25)
      >>> bool(answer.fire), float(answer.value), int(answer.layer)
      (True, 0.5, -1)
    """

    fire: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array


class Trigger(NamedTuple):
    """Decides when to synchronise.

    Attributes:
      init: (params, inner_state, views) -> trigger state, a tree of arrays; called
        once, outside `shard_map` and possibly on abstract values.
      decide: (observation, trigger state) -> (Decision, trigger state); called on
        every step on every replica, traced, before anything is sent. It must not
        communicate (that is checked).
      scheduled: whether `decide` looks at nothing but `steps`, `syncs`, `local_steps`
        and `sync_cost` of the observation, and at its own state. All replicas then know
        when a sync is due, and `replicas.step` knows it before the step: a local step
        sends nothing, and is a program without a condition.

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
    decide: Callable[[Observation, Any], tuple[Decision, Any]]
    scheduled: bool = False


class SyncState(NamedTuple):
    """What a synchronizer keeps, by what it is to the replicas; changes at syncs only.

    Where something stands says how it may be copied, averaged and read, which
    `replicas.consensus`, `mend`, `resize` and `offload` go by.

    Attributes:
      anchor: the parameters after the last sync, tree of the parameters: "the model",
        the same on all replicas.
      common: what else is the same on all replicas.
      residual: what this replica owes to later means, in parts of a mean: error
        feedback. A copy of a replica owes nothing. Replica-varying.
      own: what else is this replica's own. Replica-varying.

    Example:
      >>> SyncState(anchor={"w": jax.numpy.ones(2)}).residual
      ()
    """

    anchor: Any = ()
    common: Any = ()
    residual: Any = ()
    own: Any = ()


class Measured(NamedTuple):
    """What a replica had where the last sync began; replica-varying.

    Attributes:
      params: its parameters then, tree of the parameters.
      weight: float32[], how much it counts in that sync; 0 if it takes no part, -1 if
        something that it had was not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> float(Measured.initial({"w": jnp.ones(2)}).weight)
      0.0
    """

    params: optax.Params
    weight: jax.Array

    @classmethod
    def initial(cls, params: optax.Params) -> "Measured":
        """A copy of the parameters, before any sync has begun."""
        return cls(jax.tree.map(jnp.copy, params), jnp.zeros([], jnp.float32))


class Synchronizer(NamedTuple):
    """Says what replicas send at a sync, and how they come together.

    Syncs may be of several variants that take turns: one may bring half of the
    parameters together and the next the other half. Then `sync` and `payload` are given
    the variant, an int, as a last argument.

    Attributes:
      init: (params, inner_state, views) -> :class:`SyncState`; called once, outside
        `shard_map` and possibly on abstract values.
      sync: (local step, sync state, group) -> (updates, inner state, sync state);
        called on sync steps only. Where nobody takes part (`LocalStep.anybody`) it is
        to change nothing.
      payload: (params, inner_state, views) -> the `Payload` of one sync (see
        `curvadion_jax.compressors`), from shapes alone.
      cycle: which variant each sync is, in turn, and from the start again after the
        last. (0, 0, 1) makes every third sync one of variant 1; (0,) is for syncs that
        are all alike.
      after_local_step: whether `sync` follows the plain local step, ``local.take()``,
        and does not replace it. The step is then taken before anyone knows whether
        replicas synchronise, and `sync` is not called where nobody takes part. It
        stands in a loop, which has no reverse-mode derivative under `jit`.
      delay: k, for a sync to end k steps after it has begun. Then `init` puts
        ``Measured.initial(params)`` into `own` (see :class:`Measured`), which is filled
        in on the step on which a sync begins, and `sync` is called k steps later. It
        needs `after_local_step`.

    Example:
      >>> from curvadion_jax.compressors import exact
      >>> def sync(local, state, group):
      ...     signs = jax.tree.map(jnp.sign, local.gradients)
      ...     mean = local.mean(signs, group)
      ...     return *local.take(mean, local.inner_state), state
      >>> average_signs = Synchronizer(
      ...     init=lambda params, inner_state, views: SyncState(),
      ...     sync=sync,
      ...     payload=lambda params, inner_state, views: exact().payload(params, views),
      ... )
    """

    init: Callable[[optax.Params, optax.OptState, Views], SyncState]
    sync: Callable[..., tuple[optax.Updates, optax.OptState, SyncState]]
    payload: Callable[..., Payload]
    cycle: tuple[int, ...] = (0,)
    after_local_step: bool = False
    delay: int = 0


class Group(Protocol):
    """What may be done across replicas, for parts that know no axis.

    All methods communicate, and all replicas must call them in the same order. A mean
    is over all N of them; who takes no part brings zeros (`LocalStep.weighted`), and
    what it owes.

    Example:
      >>> from curvadion_jax._collectives import Replicas
      >>> alone: Group = Replicas()
      >>> alone.size, alone.mean({"w": 2.0})
      (1, {'w': 2.0})
    """

    @property
    def size(self) -> int:
        """Number of replicas N."""
        ...

    @property
    def replica(self) -> jax.Array | int:
        """Which of them this one is, int32[]. Replica-varying."""
        ...

    @property
    def layout(self) -> Layout:
        """How the arrays of a replica lie on its devices."""
        ...

    def laid_out(self, layout: Layout) -> "Group":
        """The same replicas, for arrays that lie otherwise, such as factors."""
        ...

    def mean(self, tree: Any) -> Any:
        """Means over the replicas, in at least float32, cast back; an all-reduce."""
        ...

    def all_to_all(self, tree: Any) -> Any:
        """Arrays [N, ...]: part k goes to replica k, and part k is from replica k."""
        ...

    def all_gather(self, tree: Any) -> Any:
        """Arrays [...] as [N, ...], of which part k is replica k's."""
        ...

    def by_device(
        self, function: Callable[["Group", list], list], tree: Any
    ) -> list[tuple[jax.Array, ...]]:
        """What ``function(group, leaves)`` returns, for every device's part of them.

        For every leaf of the tree a tuple of arrays like it. Where a replica has
        several devices, each calls the function with its own parts of the leaves, and
        the group to use there; once for all leaves that are divided over the same axes.
        So taking an array apart moves nothing inside the replica. Of a part that
        several devices hold, each gets a piece, in one dimension, and the results are
        put together inside the replica: nothing crosses between replicas twice.
        """
        ...
