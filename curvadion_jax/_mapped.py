"""The optimizer's update in a training step that is mapped over the replicas.

`replicas.step` maps the user's step by `vmap` over the leading replica axis, so that it
runs unchanged and its gradients are each replica's own. The update alone enters a
`shard_map` over the replica axis: there collectives send what they are given, and types
tell what differs between replicas.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import _collectives, _guards, _jax_internals, _layout, _paths
from curvadion_jax._interfaces import Trigger


@dataclasses.dataclass(eq=False)
class MappedStep:
    """The training step that is being traced, and what was found in it."""

    mesh: Mesh
    axis_name: str
    placed: tuple[_layout.Placed, ...] = ()  # of the state, as far as known
    due: bool | None = None  # whether a decision is due; None if the host cannot know
    # Number of steps taken -> `due`, set by an optimizer whose trigger says so.
    due_of: Callable[[int], bool] | None = None
    updates: int = 0  # by optimizers that synchronise
    counters: Sequence[_paths.Names] = ()  # of their steps, as far as they change
    params: Set[_paths.Names] = frozenset()  # that they are given of the state
    communicates: str = ""  # what it sends over the axis, besides the optimizer
    # The step is traced by itself first, for its types, and then mapped over replicas.
    # False while it is traced by itself: then a `vmap` is the user's own.
    is_program: bool = False


# `with mapping(step):` makes the step `current` while it is traced.
mapping: Any = _jax_internals.user_context(None)


def current() -> MappedStep | None:
    """The step that is being traced, if any."""
    return mapping.value


def layout() -> _layout.Layout:
    """How the arrays of a replica lie on its devices, as far as that is known."""
    if (step := current()) is None:
        return _layout.current()
    return _layout.make_layout({**step.mesh.shape, step.axis_name: 1}, step.placed)


def known_due(trigger: Trigger, cost: Callable[[int], float]) -> bool | None:
    """Whether the host knows a decision to be due; None if it does not know.

    Also tells the current step how the host can know (`due_of`). `cost` is a function
    from the number of replicas to `Observation.sync_cost`.
    """
    step = current()
    if step is None or trigger.due is None:
        return None
    due, sync_cost = trigger.due, cost(step.mesh.shape[step.axis_name])
    step.due_of = lambda steps: bool(due(steps, sync_cost))
    return step.due


def update(
    function: Callable[..., tuple[Any, Any]],
    axis_name: str | None,
    gradients: Any,
    state: Any,
    params: Any,
    *,
    has_constants: bool = False,
    **arguments: Any,
) -> tuple[Any, Any]:
    """Calls ``function(gradients, state, params, **arguments)`` of one replica.

    In `replicas.step` it runs under `shard_map`. With `has_constants` the function may
    close over values that are being traced, as under `optax.inject_hyperparams`.
    """
    step = current()
    if step is None or jax.sharding.get_abstract_mesh().manual_axes:
        return function(gradients, state, params, **arguments)
    _check_axis(step, axis_name)
    # Arrays are mapped. Python numbers stay as they are, so that they can be checked.
    arrays = {
        name: value
        for name, value in arguments.items()
        if any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(value))
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}
    function = functools.partial(function, **static)
    operands = [gradients, state, params, arrays]
    # A function among the arguments may close over traced values, too.
    has_constants |= any(map(callable, static.values()))
    if has_constants:
        function, consts = _with_consts(function, step, operands)
        operands.append(consts)

    @custom_vmap
    def of_replica(gradients, state, params, *others):
        # This supplies types alone: under the `vmap` over replicas JAX calls the rule
        # below in its place.
        del gradients, others
        return jax.tree.map(jnp.zeros_like, params), state

    @of_replica.def_vmap
    def of_all_replicas(size, batched, gradients, *others):
        if not step.is_program:
            raise ValueError(_guards.SEVERAL_MODELS.format(size))
        paths = [path for path, _ in jax.tree.leaves_with_path(gradients)]
        if paths and step.communicates and not any(jax.tree.leaves(batched[0])):
            raise _guards.already_averaged(paths[0], step.axis_name)
        # A gradient that is a constant, such as zeros, is the same on all replicas.
        gradients = _stacked(gradients, batched[0], size)
        batched = [jax.tree.map(lambda _: True, batched[0]), *batched[1:]]
        call = _in_shard_map(function, step, batched, checked=not has_constants)
        results = call(gradients, *others)
        return results, jax.tree.map(lambda _: True, results)

    return of_replica(*operands)


def _with_consts(function, step: MappedStep, operands):
    """Returns the function with its constants as a last argument, and the constants.

    These are the arrays that it closes over. It is traced without types that say what
    differs between replicas, because the constants have none yet.
    """
    found = []

    def of_replica(gradients, state, params, **arguments):
        def call(gradients, state, params, arguments):
            return function(gradients, state, params, **arguments)

        found.append(_jax_internals.trace(call, gradients, state, params, arguments))
        return jax.tree.map(jnp.zeros_like, params), state

    size = step.mesh.shape[step.axis_name]
    stacked = _stacked(operands, jax.tree.map(lambda _: False, operands), size)
    batched = jax.tree.map(lambda _: True, operands)
    jax.eval_shape(_in_shard_map(of_replica, step, batched, checked=False), *stacked)
    (traced,) = found

    def with_consts(gradients, state, params, consts, **arguments):
        program = traced.program.replace(consts=consts)
        return traced._replace(program=program)(gradients, state, params, arguments)

    return with_consts, list(traced.program.consts)


def _in_shard_map(function, step: MappedStep, batched, checked: bool):
    """The function of one replica on stacked arrays; `batched` says which are stacked.

    Its results are stacked, all of them.
    """
    axis = step.axis_name

    def body(*operands):
        operands = jax.tree.map(
            lambda b, x: jnp.squeeze(x, 0) if b else x, batched, list(operands)
        )
        gradients, state, params, arguments, *consts = operands
        state, params = _collectives.vary((state, params), axis)
        result = function(gradients, state, params, *consts, **arguments)
        result = _collectives.vary(result, axis)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), result)

    def call(*operands):
        _, state, params, *_ = operands
        _, state_batched, params_batched, *_ = batched
        like = _layout.explicit_specs((params, state), (params_batched, state_batched))
        in_specs = jax.tree.map(lambda b: P(axis) if b else P(), tuple(batched))
        return _layout.over_replicas(
            body, step.mesh, axis, in_specs, like, check_vma=checked
        )(*operands)

    return call


def _stacked(tree, batched, size: int):
    """Gives arrays that lack it a leading axis of replicas."""
    return jax.tree.map(
        lambda b, x: x if b else jnp.broadcast_to(x, (size, *x.shape)), batched, tree
    )


def _check_axis(step: MappedStep, axis_name: str | None) -> None:
    alone = axis_name is None and step.mesh.shape[step.axis_name] == 1
    if axis_name != step.axis_name and not alone:
        raise ValueError(
            f"The optimizer has axis_name={axis_name!r}, and replicas.step maps over "
            f"{step.axis_name!r}. Build the optimizer with "
            f"axis_name={step.axis_name!r}."
        )
