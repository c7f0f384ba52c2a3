"""Trace-time checks: local steps stay local, nothing can hang, gradients are local.

They look at the jaxpr of a branch before it is used, and reject collectives over the
replica axis that are not allowed there, or that not all replicas might reach.
"""

from collections.abc import Callable
from typing import Any

import jax

from curvadion_jax import _collectives, _layout
from curvadion_jax._jax_internals import (
    Jaxpr,
    Traced,
    collectives_in,
    communicates,
    decides_alone,
    equations,
    trace,
    varying,
)

SEVERAL_MODELS = (
    "The optimizer's update runs under vmap, for {} models, where both branches of a "
    "condition run: every step would send what a sync sends. Give one update the "
    "stacked parameters of all models."
)


def locally(function: Callable[..., Any], *operands: Any, axis_name: str | None) -> Any:
    """Calls a function that must stay on its replica; see `trace_local`."""
    if axis_name is None:
        return function(*operands)
    return trace_local(function, *operands, axis_name=axis_name)(*operands)


def trace_local(
    function: Callable[..., Any], *operands: Any, axis_name: str | None
) -> Traced:
    """Traces a function that must not communicate over the axis.

    With several devices per replica, it must not branch on replica-varying values.
    """
    traced = trace(function, *operands)
    if axis_name is None:
        return traced
    jaxpr = traced.program.jaxpr
    if found := collectives_in(jaxpr, axis_name):
        raise ValueError(
            f"A local step would communicate over the axis {axis_name!r} "
            f"({found[0].primitive.name}). Remove it from the inner optimizer or the "
            "trigger: the synchronizer does what has to be sent."
        )
    alone = (decides_alone(each, axis_name) for each, _ in equations(jaxpr))
    if _layout.current().axes and any(alone):
        raise ValueError(
            "The inner optimizer or the trigger has a lax.cond or while_loop that "
            f"replicas of axis {axis_name!r} may decide differently, which would "
            "deadlock with several devices in a replica. Use jnp.where; "
            "non-finite gradients need no wrapper."
        )
    return traced


def require_no_deadlock(jaxpr: Jaxpr, axis_name: str | None) -> None:
    """Rejects a collective in a branch that replicas may not take together."""
    if axis_name is None:
        return
    for equation, around in equations(jaxpr):
        alone = (decides_alone(each, axis_name) for each in around)
        if communicates(equation, axis_name) and any(alone):
            raise ValueError(
                f"A collective over axis {axis_name!r} is inside a lax.cond or "
                "while_loop that replicas may decide differently, which would "
                "deadlock. Put the condition around the inner optimizer: "
                "adaptive_sync(optax.apply_if_finite(inner, 3), ...)."
            )


@jax.custom_batching.custom_vmap
def one_decision(fire: jax.Array) -> jax.Array:
    """Returns the decision to synchronise; rejects several at once, under `vmap`."""
    return fire


@one_decision.def_vmap
def _(size, batched, fire):
    if batched[0]:
        raise ValueError(SEVERAL_MODELS.format(size))
    return fire, batched[0]


def require_local_gradients(
    gradients: Any, axis_name: str | None, *, allow_unchecked: bool = False
) -> None:
    """Rejects gradients that were already averaged over the replicas.

    By their type they are the same on all replicas. Under check_vma=False types do not
    tell, which `allow_unchecked` accepts.
    """
    leaves = jax.tree.leaves_with_path(gradients)
    if axis_name is None:
        sizes = jax.sharding.get_abstract_mesh().shape
        for path, leaf in leaves:
            if axes := [axis for axis in varying(leaf) if sizes.get(axis, 1) > 1]:
                raise ValueError(
                    f"axis_name is None, but the gradient "
                    f"{jax.tree_util.keystr(path)} differs along the mesh axis "
                    f"{', '.join(sorted(axes))}: replicas would never synchronise. "
                    f"Pass axis_name={min(axes)!r}."
                )
        return
    if not _collectives.is_manual(axis_name):
        return
    if not _collectives.is_checked(axis_name):
        if allow_unchecked:
            return
        raise ValueError(
            "With check_vma=False (or pmap) gradients that were averaged over "
            f"{axis_name!r} already look like local ones. Use "
            "curvadion_jax.replicas.step, or a shard_map with check_vma, or make sure "
            "yourself and pass allow_unchecked=True."
        )
    for path, leaf in leaves:
        if axis_name not in varying(leaf):
            raise already_averaged(path, axis_name)


def already_averaged(path: Any, axis_name: str) -> ValueError:
    """Makes the error for a gradient that is the same on all replicas."""
    return ValueError(
        f"Gradient {jax.tree_util.keystr(path)} was already averaged over axis "
        f"{axis_name!r}, so every step would communicate in full. Remove the pmean or "
        "psum; if there is none, the parameters are replicated (in_specs=P()): use "
        "curvadion_jax.replicas.step."
    )
