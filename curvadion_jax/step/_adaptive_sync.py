"""Makes one optimizer of rows from an inner optimizer, a trigger and a synchronizer.

`_AdaptiveSync._update` is the algorithm: the trigger looks at every replica, one number
decides, every replica takes its own step, which a sync follows or replaces (`_step`),
and what happened is counted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from curvadion_jax import (
    _arguments,
    _checksum,
    _dtypes,
    _finite,
    _memory,
    _trees,
    metrics,
    triggers,
)
from curvadion_jax.matrices import _dion
from curvadion_jax.mesh import _group, _rows, _within_replica
from curvadion_jax.mesh._group import Group
from curvadion_jax.mesh._layout import Layout, make_layout
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.step import _refuse_copies, _step, _sync_state
from curvadion_jax.step._sync_state import AdaptiveSyncState, Common, Rows
from curvadion_jax.synchronizers import AfterStep, Synchronizer
from curvadion_jax.triggers import Clock, Measured, Seen, Trigger


def adaptive_sync(
    inner: optax.GradientTransformation,
    trigger: Trigger,
    synchronizer: Synchronizer,
    mesh: Replicas = None,
    *,
    before: optax.GradientTransformation | None = None,
    specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Lets replicas take local steps, and synchronises them when a trigger decides so.

    The result is an ordinary Optax transformation of rows: gradients and parameters are
    [R, ...], with a row for each replica. On most steps every replica takes its own
    step of the inner optimizer, and nothing is sent. Where the trigger decides so all
    take part in a sync. The decision is one number for all replicas, so Optax's
    wrappers (`optax.MultiSteps`, `optax.apply_if_finite`) work around this optimizer
    and inside it. Call `update` under `jax.jit`: by itself it would compile on every
    call.

    A replica whose gradients are not finite takes the step of a zero gradient. One
    whose state is not finite is excluded from the next sync, and begins again there
    from the anchor (:func:`curvadion_jax.replicas.repair` mends parameters that are not
    finite). One of weight 0 is absent. All of that is counted
    (:func:`curvadion_jax.metrics.read`).

    .. warning::
      A transformation around this one gets all replicas at once. If it is not
      elementwise, such as `optax.clip_by_global_norm`, it would clip by the norm over
      all replicas and send a number on every step. Pass it as `before`, or make it one
      of rows with :func:`curvadion_jax.replicas.lift`.

    Args:
      inner: optimizer of one replica, learning rate included. Keys of `jax.random.key`
        in its state, as of `optax.add_noise`, become each replica's own. They stay
        common with a synchronizer within the step, for all to take one step at a sync.
      trigger: when to synchronise, see `curvadion_jax.triggers`.
      synchronizer: how replicas synchronise, see `curvadion_jax.synchronizers`.
      mesh: from `replicas.make_mesh` or `replicas.simulated`. None is one replica,
        whose arrays have no axis of replicas.
      before: transformation of one replica's gradients, in front of the trigger and
        the inner optimizer, such as ``optax.clip_by_global_norm(1.0)``. It is given no
        extra arguments.
      specs: tree of `jax.sharding.PartitionSpec` of one replica's parameters over the
        axes inside a replica, or a prefix of it. Needed where these axes are automatic.

    Returns:
      A transformation with :class:`AdaptiveSyncState`. Updates have the parameters'
      dtypes, and are finite. `update` takes ``weight=w``, float32[R]: how much each
      replica counts in means over the replicas, such as the number of tokens in its
      batch; 0 means absent, None means 1. A sync that follows local steps counts the
      sum since the last sync, also of steps whose gradients were not finite, and keeps
      a share of the mean for absent replicas, as if they weighed as much as the others
      on average: they add their drift when they are back. All other extra arguments
      go to `inner`, the same for all replicas.

    Raises:
      TypeError: if `mesh` is no mesh, or `inner`, `trigger`, `synchronizer` or `before`
        is not what a call of theirs returns; at `init`, if a parameter is no real
        floating-point number of at least 16 bits; at `update`, if an extra argument
        is a function and there is a mesh.
      ValueError: at `init`, if the inner optimizer keeps a copy of the parameters, or
        the replicas' parameters differ (not under jit, where nobody knows: with
        `reconcile` they then meet at the first sync); at `update`, if `params` is
        missing, trees or shapes do not match, the state is of other parameters or of
        another optimizer, `weight` is not one number for each replica, or another extra
        argument is known to have a row for each.

    Example:
      >>> from curvadion_jax import replicas, synchronizers, triggers
      >>> mesh = replicas.simulated(2)
      >>> local_sgd = adaptive_sync(
      ...     optax.sgd(0.1), triggers.every_k(2), synchronizers.reconcile(), mesh
      ... )
      >>> params = replicas.replicate({"w": jnp.zeros(1)}, mesh)
      >>> gradients = {"w": jnp.array([[1.0], [3.0]])}  # a row for each replica
      >>> state = local_sgd.init(params)
      >>> for _ in range(2):
      ...     updates, state = local_sgd.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params["w"].ravel())
      [-0.1 -0.3]
      [-0.4 -0.4]
    """
    _rows.check_mesh(mesh)
    is_optax = lambda x: hasattr(x, "init") and hasattr(x, "update")
    check = _arguments.check_part
    check(inner, is_optax(inner), "inner", "optax.adamw(0.003)")
    check(trigger, isinstance(trigger, Trigger), "trigger", "triggers.evenly(0.03)")
    is_one = isinstance(synchronizer, Synchronizer)
    check(synchronizer, is_one, "synchronizer", "synchronizers.reconcile()")
    is_one = before is None or is_optax(before)
    check(before, is_one, "before", "optax.clip_by_global_norm(1.0)")
    optimizer = _AdaptiveSync(
        inner=optax.with_extra_args_support(inner),
        trigger=trigger,
        synchronizer=synchronizer,
        mesh=mesh,
        before=None if before is None else optax.with_extra_args_support(before),
        specs=specs,
    )
    init, update = optimizer.init, optimizer.update
    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_functions(arguments: dict[str, Any]) -> None:
    """Refuses what would give each replica the rows that a function closes over."""
    for name, argument in arguments.items():
        if any(map(callable, jax.tree.leaves(argument))):
            raise TypeError(
                f"Extra argument {name!r} is a function, and what it closes over would "
                "be the same for all replicas. Pass arrays."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _AdaptiveSync:
    """The transformation; see `adaptive_sync` for the attributes."""

    inner: optax.GradientTransformationExtraArgs
    trigger: Trigger
    synchronizer: Synchronizer
    mesh: Replicas
    before: optax.GradientTransformationExtraArgs | None
    specs: Any

    def steps(self, layout: Layout) -> _step.Steps:
        return _step.Steps(self.inner, self.synchronizer, self.mesh, layout)

    @property
    def reconciles(self) -> bool:
        """Whether a sync follows the replicas' own steps and ends at an anchor."""
        return isinstance(self.synchronizer, AfterStep)

    def init(self, params) -> AdaptiveSyncState:
        _trees.check_trainable(params)
        _rows.check_rows(params, self.mesh, "Parameter")
        layout = make_layout(self.mesh, self.specs, params)
        if self.mesh is not None and self.reconciles:  # only such syncs move parameters
            _refuse_copies.refuse_copies(self.inner, _shapes_of_one(params, self.mesh))

        def start(params):
            initial = functools.partial(
                self._initial_state, layout=layout, unseen=_are_unseen(params)
            )
            state = jax.jit(initial)(params)
            if self.mesh is not None:
                _refuse_unequal(state.counters.checksum)
            return state

        if _rows.explicit_axes(self.mesh):
            return _sync_state.on_automatic_axes(start, params, self.mesh, layout)
        return start(params)

    def _initial_state(self, params, layout: Layout, unseen: bool) -> AdaptiveSyncState:
        group = Group(_rows.axis_name(self.mesh), layout)
        before = self.before or optax.identity()

        def of_one(params, _):
            inner_state = self._placed_qs(params, self.inner.init(params), layout)
            if self.reconciles:  # else all must take the same step at a sync
                inner_state = group.own_keys(inner_state)
            rows = Rows(
                before_state=group.own_keys(before.init(params)),
                inner_state=inner_state,
                remembered=self.trigger.init(params, inner_state),
                residual=self.synchronizer.init_residual(params),
                weight=jnp.zeros([], jnp.float32) if self.reconciles else (),
            )
            anchor = params if self.reconciles else ()
            if self.reconciles and unseen:
                # The first replica's. Should they not begin alike, which nobody can
                # refuse here, the first sync still brings all of them to one anchor.
                anchor = group.first(params)
            start = anchor if self.reconciles else inner_state
            common = Common(
                anchor=anchor,
                sync_state=self.synchronizer.init_state(start),
                trigger_state=self.trigger.init_state(),
            )
            return (rows, _checksum.of(params)), common

        (rows, checksum), common = _rows.over(of_one, self.mesh)(params, ())
        costs = self._costs(params, rows.inner_state, layout)
        counters = metrics.initial(checksum, costs)
        state = AdaptiveSyncState(common, rows, counters)
        return self._placed(state, params, layout)

    def _placed(self, state: AdaptiveSyncState, params, layout: Layout):
        """The state, where its arrays lie on the mesh."""
        return _sync_state.placed(
            state,
            inner=self.inner,
            before=self.before or optax.identity(),
            synchronizer=self.synchronizer,
            params=params,
            mesh=self.mesh,
            layout=layout,
        )

    def _placed_qs(self, params, inner_state, layout: Layout):
        """The state with Dion's Q sharded as after a step: its update knows how."""
        if not layout.is_divided or not _dion.states_of(inner_state):
            return inner_state
        take = self.steps(layout).take(params, {})
        zeros = jax.tree.map(jnp.zeros_like, params)
        after, _ = _dion.with_new_momentum(take, zeros, inner_state)
        new = iter(_dion.states_of(after))
        return _dion.with_states(
            inner_state, lambda dion: dion._replace(dion_q=next(new).dion_q)
        )

    def update(
        self,
        updates,
        state,
        params=None,
        *,
        weight=None,
        **extra_args,
    ):
        _rows.check_rows(params, self.mesh, "Parameter")
        _trees.check_gradients(updates, params)
        _sync_state.check_state(state)
        if self.reconciles:
            of_one = _shapes_of_one(params, self.mesh)
            _sync_state.check_like_params(state.common.anchor, of_one)
        _rows.check_rows(state.rows, self.mesh, "State")
        _rows.check_common(extra_args, self.mesh)
        if self.mesh is not None:
            _refuse_functions(extra_args)
        layout = make_layout(self.mesh, self.specs, params)
        weight = _group.checked_weight(weight, state.counters.value)
        run = functools.partial(self._update, layout=layout)
        if axes := _rows.explicit_axes(self.mesh):
            # The update sees automatic axes, and leaves all as it was sharded before.
            results = jax.tree.map(lambda x: jax.typeof(x).sharding, (params, state))
            auto_axes: Any = jax.sharding.auto_axes
            run = auto_axes(run, axes=axes, out_sharding=results)
        try:
            updates, state = run(updates, state, params, weight, extra_args)
        except (AttributeError, TypeError, ValueError) as error:
            # Most often the state of another optimizer, of which JAX says little.
            if not _rows.explicit_axes(self.mesh):
                initial = functools.partial(
                    self._initial_state, layout=layout, unseen=True
                )
                if note := _sync_state.unlike_initial(state, initial, params):
                    error.add_note(note)
            raise
        _sync_state.check_like_params(updates, params)  # a state may be broadcast, too
        return updates, state

    def _update(self, gradients, state, params, weight, extra_args, *, layout):
        common: Common = state.common
        rows: Rows = state.rows
        counters: metrics.Counters = state.counters
        steps = self.steps(layout)
        costs = self._costs(params, rows.inner_state, layout)
        cost_of_sync = costs.of_sync(_rows.count(self.mesh))
        clock = Clock(counters.steps, counters.syncs, counters.since, cost_of_sync)
        checksum = self._checksum_after_sync(params, counters)
        present = weight > 0  # on this step
        weight_since_sync = self._weight_since_sync(rows, weight)

        # 1. Every replica's gradients, and its value if the trigger measures one.
        prepared = self._prepare(
            gradients,
            params,
            rows,
            present,
            checksum,
            common.anchor,
            clock,
            steps,
            extra_args,
        )

        # 2. One decision, for all replicas.
        decision = self._decide(prepared.value, present, clock, common.trigger_state)
        common = common._replace(trigger_state=decision.trigger_state)

        # 3. Every replica's own step. A sync follows it or replaces it, or none does.
        given = _step.Given(
            params=params,
            gradients=prepared.gradients,
            finite=prepared.finite,
            weight=jnp.where(present, weight_since_sync, 0),
            inner_state=rows.inner_state,
        )
        if self.reconciles:
            after_own = steps.own(given, rows.residual, extra_args), common
            sync = functools.partial(steps.sync_after, given)
            outcome, common = _step.once(decision.fire, sync, after_own, _step.SYNC)
        else:
            outcome, common = steps.with_mean_if(
                decision.fire, given, rows.residual, common, extra_args
            )
        updates = _finite.finite_elements(outcome.updates)

        # 4. What happened is counted, and kept for the next step.
        counters = metrics.counted(
            counters,
            costs,
            prepared,
            outcome,
            threshold=decision.threshold,
            fire=decision.fire,
            voted=decision.voted,
            displaced=(checksum != counters.checksum) & (counters.checksum != 0),
        )
        rows = Rows(
            before_state=prepared.before_state,
            inner_state=outcome.inner_state,
            remembered=self._remembered(
                prepared.remembered, outcome, params, decision.fire
            ),
            residual=outcome.residual,
            weight=self._weight_left(weight_since_sync, outcome),
        )
        state = AdaptiveSyncState(common, rows, counters)
        return updates, self._placed(state, params, layout)

    def _weight_since_sync(self, rows: Rows, weight: jax.Array) -> jax.Array:
        """How much each replica counts, should this step have a sync, float32[R].

        A drift counts by the weights of all steps since the last sync. (A replica that
        was absent then brings the drift of several rounds, which is longer.)
        """
        if not self.reconciles:
            return weight
        return jnp.minimum(rows.weight + weight, jnp.finfo(jnp.float32).max)

    def _weight_left(self, weight: jax.Array, outcome: _step.Outcome) -> Any:
        """The same after the step: zero if it had a sync."""
        return jnp.where(outcome.met, 0, weight) if self.reconciles else ()

    def _decide(self, values, present, clock: Clock, state) -> _Decision:
        """Whether all replicas synchronise; `values` and `present` are rows."""
        due = self.trigger.due(clock)
        threshold = self.trigger.threshold(clock, state)
        requested, voted = due, False
        if self.trigger.look is not None and due is not False:
            # A replica without weight requests nothing.
            requests = triggers.requests(values, threshold) & present
            requested, voted = self._vote(requests, due), due
        fire, new = self.trigger.decide(clock, requested, state)
        fire = False if due is False else fire & due
        return _Decision(fire, voted, threshold, _dtypes.cast_like(new, state))

    def _vote(self, requests: jax.Array, due: jax.Array | bool) -> jax.Array:
        """Whether a decision is due and any replica requests a sync, bool[]."""
        group = Group(_rows.axis_name(self.mesh))

        def vote(requests):
            any_of = lambda request, _: ((), group.any(request))
            return _rows.over(any_of, self.mesh)(requests, ())[1]

        if due is True:
            return vote(requests)
        with jax.named_scope(_step.VOTE):
            return lax.cond(due, vote, lambda _: jnp.array(False), requests)

    def _costs(self, params, inner_state, layout: Layout) -> metrics.Costs:
        """The bytes of a sync, of a vote, and of all gradients in float32."""
        params, inner_state = _shapes_of_one((params, inner_state), self.mesh)
        payload = self.synchronizer.payload(params, inner_state, layout)
        number = 4 * layout.devices
        return metrics.Costs(
            averaged=payload.averaged,
            gathered=payload.gathered,
            number=number,
            gradients=number * _within_replica.elements_per_device(params, layout),
        )

    def _prepare(
        self,
        gradients,
        params,
        rows: Rows,
        present,
        checksum,
        anchor,
        clock: Clock,
        steps: _step.Steps,
        extra_args,
    ) -> _Prepared:
        """Gradients that are finite, and what the trigger measures; nothing is sent."""

        def of_one(row, common):
            gradients, params, rows, present, checksum = row
            anchor, clock, extra_args = common
            gradients, finite, before_state = self._sound_gradients(
                gradients, params, rows.before_state, checksum
            )
            measured, remembered = Measured(0.0), rows.remembered
            if self.trigger.look is not None:
                # Of Dion that is M + G alone, once more in `Steps.own`, which takes the
                # whole step. Another optimizer's update the compiler merges with that.
                take = steps.take(params, extra_args)
                after, is_known = _dion.with_new_momentum(
                    take, gradients, rows.inner_state
                )
                seen = Seen(
                    gradients=gradients,
                    params=params,
                    inner_state=rows.inner_state,
                    after=after,
                    after_is_known=is_known,
                    finite=finite,
                    present=present,
                    anchor=anchor,
                    clock=clock,
                )
                measured, new = self.trigger.look(seen, remembered)
                remembered = _dtypes.cast_like(new, remembered)
            prepared = _Prepared(
                gradients=gradients,
                before_state=before_state,
                remembered=remembered,
                finite=finite,
                value=jnp.asarray(measured.value, jnp.float32),
                layer=jnp.asarray(measured.layer, jnp.int32),
            )
            return prepared, ()

        measures = self.trigger.look is not None
        anchor = _memory.to_device(anchor) if measures else ()
        row = gradients, params, rows._replace(residual=()), present, checksum
        common = anchor, clock, extra_args
        return _rows.over(of_one, self.mesh)(row, common)[0]

    def _sound_gradients(self, gradients, params, before_state, checksum):
        """One replica's gradients after `before`, all zeros if any is not finite.

        Returns them, whether they were finite, and the new state of `before`.
        """
        # The second condition is always true, and XLA cannot tell. So the gradients
        # depend on the checksum of the old parameters, and through them the new
        # parameters, which may then take the old ones' place. Else a CPU copies all.
        finite = _finite.norms_finite(gradients) & ((checksum | 1) != 0)
        gradients = _finite.or_zeros(finite, gradients)
        if self.before is None:
            return gradients, finite, before_state
        gradients, new = self.before.update(gradients, before_state, params)
        # What `before` makes of them may not be finite either, such as 0/0.
        sound = _finite.norms_finite(gradients)
        gradients = _finite.or_zeros(sound, gradients)
        new = _finite.repaired(_dtypes.cast_like(new, before_state), before_state)
        return gradients, finite & sound, new

    def _remembered(self, remembered, outcome: _step.Outcome, params, fire):
        """What the trigger remembers; nothing of an inner state that began again."""
        if fire is False or not jax.tree.leaves(remembered):
            return remembered

        def of_one(row, _):
            remembered, params, outcome = row
            params = optax.apply_updates(params, outcome.updates)
            fresh = self.trigger.init(params, outcome.inner_state)
            return optax.tree.where(outcome.restarted, fresh, remembered), ()

        row = remembered, params, outcome._replace(residual=())
        return _rows.over(of_one, self.mesh)(row, ())[0]

    def _checksum_after_sync(self, params, counters: metrics.Counters) -> jax.Array:
        """Of parameters on the step after a sync, uint32[R]; else as that left it."""
        of_one = lambda params, _: (_checksum.of(params), ())
        return lax.cond(
            counters.since == 0,
            lambda params: _rows.over(of_one, self.mesh)(params, ())[0],
            lambda params: counters.checksum,
            params,
        )


class _Decision(NamedTuple):
    """What all replicas do: whether they synchronise, and whether they voted on it."""

    fire: jax.Array | bool
    voted: jax.Array | bool
    threshold: jax.Array
    trigger_state: Any


class _Prepared(NamedTuple):
    """One replica, after its trigger has looked at it."""

    gradients: Any
    before_state: Any
    remembered: Any
    finite: jax.Array
    value: jax.Array
    layer: jax.Array


def _shapes_of_one(tree: Any, mesh: Replicas) -> Any:
    """The shapes and dtypes of one replica's arrays."""
    lead = 0 if mesh is None else 1
    shape = lambda x: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype)
    return jax.tree.map(shape, tree)


def _are_unseen(rows: Any) -> bool:
    """Whether nobody can compare the rows: under jit, or of other processes."""
    return any(
        isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True)
        for x in jax.tree.leaves(rows)
    )


def _refuse_unequal(checksum: jax.Array) -> None:
    """Rejects replicas that begin with different parameters."""
    if _are_unseen(checksum):
        return
    if len({*jax.device_get(checksum).ravel().tolist()}) > 1:
        raise ValueError(
            "The replicas' parameters differ, and all replicas must begin alike. Give "
            "the parameters of replicas.replicate(params, mesh); after training, those "
            "of replicas.replicate(replicas.consensus(params), mesh)."
        )
