"""The state of `adaptive_sync`: what it is made of, and where it lies on the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _memory, _trees, metrics
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._layout import Layout
from curvadion_jax.mesh._rows import AXIS, Replicas
from curvadion_jax.synchronizers import AfterStep, Synchronizer


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
        without error feedback. A sync adds it to what it sends, and finds the next one
        (`Compressor.mean_with_feedback`). A replica that is not healthy brings zeros
        (`Steps`), and an element stays where the anchor's does (`reconcile`).
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


def check_like_params(tree: Any, params: Any) -> None:
    """Rejects the state of other parameters, which might be broadcast silently.

    `tree` is what has to be like them: an anchor, or updates.
    """
    if change := _trees.first_change(tree, params, _described):
        path, was, now = change
        raise ValueError(
            f"The state is of other parameters or another optimizer: {path} is {was}, "
            f"and {now} now. Call init for these."
        )


def unlike_initial(
    state: AdaptiveSyncState,
    initial: Callable[[Any], AdaptiveSyncState],
    params: Any,
) -> str:
    """What to say of a state that is not like what `initial` makes of parameters."""
    expected = jax.eval_shape(initial, params)
    change = _trees.first_change(state, expected, _described)
    if not change:
        return ""
    path, was, now = change
    return (
        f"The state is another optimizer's: {path} is {was}, and {now} in this one's. "
        "Give what this optimizer's init returned."
    )


def _described(x: Any) -> str:
    """An array's dtype and shape, or the type of what is none."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    return f"{x.dtype}{list(x.shape)}"


def placed(
    state: AdaptiveSyncState,
    *,
    inner: optax.GradientTransformation,
    before: optax.GradientTransformation,
    synchronizer: Synchronizer,
    params: Any,
    mesh: Replicas,
    layout: Layout,
) -> AdaptiveSyncState:
    """The state of `adaptive_sync`, with all that is like parameters as these lie.

    On every step, or arrays would lie otherwise after the first one, and the second
    call would compile again.
    """
    if not isinstance(mesh, Mesh):
        return state
    row = lambda x, spec=(): _constrain(x, mesh, P(AXIS, *spec))
    common = lambda x, spec=(): _constrain(x, mesh, P(*spec))
    counter = lambda x: row(x) if x.ndim == 1 else common(x)
    state = state._replace(counters=jax.tree.map(counter, state.counters))
    if not layout.is_divided:
        return state._replace(
            common=jax.tree.map(common, state.common),
            rows=jax.tree.map(row, state.rows),
        )
    specs = jax.tree.unflatten(jax.tree.structure(params), layout.of(params))
    scalars = lambda tree: jax.tree.map(lambda x: x if x.ndim else common(x), tree)
    anchor, sync_state, trigger_state = state.common
    if isinstance(synchronizer, AfterStep):
        anchor = jax.tree.map(common, anchor, specs)
        outer = _like_params(sync_state, synchronizer.init_state, specs, common)
        sync_state = scalars(outer)
    residual = state.rows.residual
    if jax.tree.leaves(residual):
        residual = jax.tree.map(row, residual, specs)
    rows = state.rows._replace(
        inner_state=_like_params(state.rows.inner_state, inner, specs, row),
        before_state=_like_params(state.rows.before_state, before, specs, row),
        residual=residual,
        weight=jax.tree.map(row, state.rows.weight),
    )
    common_state = Common(anchor, sync_state, scalars(trigger_state))
    return AdaptiveSyncState(common_state, rows, state.counters)


def _like_params(
    tree: Any,
    init: Callable[[Any], Any] | optax.GradientTransformation,
    specs: Any,
    place: Callable[[jax.Array, P], jax.Array],
) -> Any:
    """Places all that is like parameters; Optax knows what is, from `init`."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)

    def place_like(x, spec):
        return x if is_masked(x) else place(x, spec)

    return optax.tree.map_params(init, place_like, tree, specs, is_leaf=is_masked)


def _constrain(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    if not _memory.is_on_device(x):
        return x  # its type keeps it there
    sharding = NamedSharding(_rows.automatic(mesh), spec)
    return lax.with_sharding_constraint(x, sharding)


def on_automatic_axes(
    function: Callable[[Any], Any], params: Any, mesh: Any, layout: Layout
) -> Any:
    """Calls a function of rows on the same devices, all of whose axes are automatic.

    Its results lie on the mesh with Explicit axes, as the function left them.
    """
    arrays, structure = jax.tree.flatten(params)
    if any(isinstance(x, Tracer) for x in arrays):
        raise ValueError(
            "tx.init is being traced, and the mesh has Explicit axes. Call it outside "
            "of jit, where arrays lie on their devices."
        )
    types = (AxisType.Auto,) * len(mesh.axis_names)
    twin = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    shardings = [NamedSharding(twin, P(AXIS, *spec)) for spec in layout.of(params)]

    def back(x):
        is_named = isinstance(x.sharding, NamedSharding)
        return jax.device_put(
            x, NamedSharding(mesh, x.sharding.spec if is_named else P())
        )

    with jax.set_mesh(twin):  # the caller's may be one with axes of other types
        results = function(structure.unflatten(jax.device_put(arrays, shardings)))
    return jax.tree.map(back, results)
