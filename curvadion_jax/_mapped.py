"""The optimizer's update in a training step that is mapped over the replicas.

`replicas.step` maps the user's step by `vmap` over the leading replica axis, so that it
runs unchanged and its gradients are each replica's own. The update alone enters a
`shard_map` over the replica axis: there `lax.cond` stays a condition, and collectives
send what they are given. (Under `vmap` alone both branches would run on every step.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import _collectives, _guards, _jax_internals, _layout
from curvadion_jax._interfaces import Trigger


@dataclasses.dataclass(eq=False)
class Mapped:
    """The training step that is being traced, and what was seen of it."""

    mesh: Mesh
    axis_name: str
    due: bool | None = None  # whether a decision is due, where the host knows
    # Number of steps taken -> `due`, by which the host can know.
    due_of: Callable[[int], bool] | None = None
    updates: int = 0  # of optimizers that synchronise
    communicates: bool = False  # over the axis, besides the optimizer
    # Whether it is traced and being mapped; a vmap before that is one of the user's.
    is_program: bool = False


# `with mapping(step):` lets `update` know the step around it.
mapping: Any = _jax_internals.user_context()


def current() -> Mapped | None:
    """The step that is being traced, if any."""
    return mapping.value


def is_tracing() -> bool:
    """Whether a function is being traced here."""
    return isinstance(jnp.zeros([]), Tracer)


def known_due(trigger: Trigger, cost: Callable[[int], float]) -> bool | None:
    """Whether the host knows a decision to be due; None if it does not know.

    `cost` takes the number of replicas to `Observation.sync_cost`.
    """
    mapped = current()
    if mapped is None or trigger.due is None:
        return None
    due, sync_cost = trigger.due, cost(mapped.mesh.shape[mapped.axis_name])
    mapped.due_of = lambda steps: bool(due(steps, sync_cost))
    return mapped.due


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
    """``function(gradients, state, params, **arguments)`` of one replica.

    Inside `replicas.step` under `shard_map`; elsewhere where it is called. With
    `has_constants` the function may close over values that are being traced, as under
    `optax.inject_hyperparams`.
    """
    mapped = current()
    if mapped is None or jax.sharding.get_abstract_mesh().manual_axes:
        return function(gradients, state, params, **arguments)
    _check_axis(mapped, axis_name)
    # Python numbers stay as they are, so that they can be checked.
    arrays = {k: v for k, v in arguments.items() if _has_arrays(v)}
    rest = {k: v for k, v in arguments.items() if k not in arrays}
    function = functools.partial(function, **rest)
    given = [gradients, state, params, arrays]
    # A function among the arguments may close over traced values, too.
    has_constants |= any(map(callable, rest.values()))
    if has_constants:  # these are mapped as well
        function, consts = _with_consts(function, mapped, given)
        given.append(consts)

    @custom_vmap
    def one(gradients, state, params, *others):
        del gradients, others  # for the types of the results; never run
        return jax.tree.map(jnp.zeros_like, params), state

    @one.def_vmap
    def _(size, batched, *operands):
        if not mapped.is_program:
            raise ValueError(_guards.SEVERAL_MODELS.format(size))
        paths = [path for path, _ in jax.tree.leaves_with_path(operands[0])]
        if paths and mapped.communicates and not any(jax.tree.leaves(batched[0])):
            raise _guards.already_averaged(paths[0], mapped.axis_name)
        # A gradient that is a constant, such as zeros, is the same on all replicas.
        flags = [jax.tree.map(lambda _: True, batched[0]), *batched[1:]]
        operands = (_stacked(operands[0], batched[0], size), *operands[1:])
        results = _in_shard_map(function, mapped, flags, not has_constants)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return one(*given)


def _with_consts(function, mapped: Mapped, given):
    """The function with its constants as a last argument, and these constants.

    Constants are what it closes over. It becomes a program, traced without types that
    say what differs between replicas: its constants have none yet.
    """
    found = []

    def of_replica(gradients, state, params, **arguments):
        def call(gradients, state, params, arguments):
            return function(gradients, state, params, **arguments)

        found.append(_jax_internals.trace(call, gradients, state, params, arguments))
        return jax.tree.map(jnp.zeros_like, params), state

    flags = jax.tree.map(lambda _: True, given)
    size = mapped.mesh.shape[mapped.axis_name]
    stacked = _stacked(given, jax.tree.map(lambda _: False, given), size)
    jax.eval_shape(_in_shard_map(of_replica, mapped, flags, checked=False), *stacked)
    (traced,) = found

    def with_consts(gradients, state, params, consts, **arguments):
        program = traced.program.replace(consts=consts)
        return traced._replace(program=program)(gradients, state, params, arguments)

    return with_consts, list(traced.program.consts)


def _in_shard_map(function, mapped: Mapped, batched, checked: bool):
    """The update with stacked results, of operands some of which are stacked."""
    axis = mapped.axis_name

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
        _, of_state, of_params, *_ = batched
        like = _layout.explicit_specs((params, state), (of_params, of_state))
        in_specs = jax.tree.map(lambda b: P(axis) if b else P(), tuple(batched))
        return _layout.over_replicas(
            body, mapped.mesh, axis, in_specs, like, check_vma=checked
        )(*operands)

    return call


def _stacked(tree, batched, size: int):
    return jax.tree.map(
        lambda b, x: x if b else jnp.broadcast_to(x, (size, *x.shape)), batched, tree
    )


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(tree))


def _check_axis(mapped: Mapped, axis_name: str | None) -> None:
    alone = axis_name is None and mapped.mesh.shape[mapped.axis_name] == 1
    if axis_name != mapped.axis_name and not alone:
        raise ValueError(
            f"The optimizer has axis_name={axis_name!r}, and replicas.step maps over "
            f"{mapped.axis_name!r}. Build the optimizer with "
            f"axis_name={mapped.axis_name!r}."
        )
