"""Trace-time checks: local steps stay local, nothing can hang, gradients are local.

Inspects each branch's jaxpr before it is used, and rejects collectives over the replica
axis where there may be none, or where replicas may not come together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from curvadion_jax import _collectives, _jaxprs

# Around the optimizer's own communication, in the names of a program's equations.
SCOPE = "curvadion_jax.update"
SEVERAL_MODELS = (
    "update runs under vmap, for {} models: a condition with several decisions runs "
    "both of its branches, so that every step would send all that a sync sends. Give "
    "one update the parameters of all models, stacked: leading axes are stacks of "
    "matrices"
)


def switch(
    which: jax.Array | int,
    local: Callable[..., Any],
    syncs: Sequence[Callable[..., Any]],
    *operands: Any,
    axis_name: str | None,
    divided: bool = False,
) -> Any:
    """`lax.cond` around collectives, that cannot hang and keeps local steps local.

    Args:
      which: int32[], the same on all replicas: 0 is the local branch, v the v-th sync.
        An int is known, and that branch the program.
      local: branch that may not communicate over the axis.
      syncs: branches that may; one makes this a `lax.cond`, several a `lax.switch`.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.
      divided: whether a replica has several devices.

    Returns:
      What the chosen branch returns, marked as varying over the axis.

    Raises:
      ValueError: if the choice may differ between replicas (the program would wait
        for ever), if the local branch holds a collective over the axis, or if the
        branches return different shapes or dtypes.
    """

    def traced_sync(sync):
        branch = _jaxprs.trace(sync, *operands)
        require_no_deadlock(branch.program.jaxpr, axis_name)
        return branch

    traced = trace_local(local, *operands, axis_name=axis_name, divided=divided)
    # All of them, known or not: what is wrong with a sync is said before the first one.
    branches = [traced, *map(traced_sync, syncs)]
    axes = _jaxprs.axes_of_results(branches)

    def marked(branch):
        return lambda *args: _collectives.vary(
            _collectives.vary_over(branch(*args), axes), axis_name
        )

    functions = [marked(branch) for branch in branches]
    if isinstance(which, int):
        return functions[which](*operands)
    require_shared(which, axis_name)
    if len(functions) == 2:
        return lax.cond(which > 0, *reversed(functions), *operands)
    return lax.switch(which, functions, *operands)


def locally(
    function: Callable[..., Any],
    *operands: Any,
    axis_name: str | None,
    divided: bool = False,
) -> Any:
    """Result of a computation that must stay on its replica.

    Raises:
      ValueError: if it would communicate over the axis, or decide by what differs
        between replicas of several devices.
    """
    if axis_name is None:
        return function(*operands)
    traced = trace_local(function, *operands, axis_name=axis_name, divided=divided)
    return traced(*operands)


def require_shared(
    x: jax.Array, axis_name: str | None, what: str = "the decision to synchronise"
) -> None:
    """Rejects what decides about a collective and may differ between replicas."""
    if axis_name is not None and _collectives.is_varying(x, axis_name):
        raise ValueError(
            f"{what} differs between the replicas of axis {axis_name!r}; some would "
            "wait for ever for the others. Reduce it over the axis first. (The number "
            "of a step comes from outside, as a further argument of the function that "
            "replicas.step returns, train(state, batch, step).)"
        )


def trace_local(
    function: Callable[..., Any], *operands: Any, axis_name: str | None, divided: bool
) -> _jaxprs.Traced:
    """The program of a function that must not communicate over the axis."""
    traced = _jaxprs.trace(function, *operands)
    if axis_name is None:
        return traced
    jaxpr = traced.program.jaxpr
    if found := _jaxprs.collectives_in(jaxpr, axis_name):
        raise ValueError(
            f"a local step would communicate over the axis {axis_name!r} "
            f"({found[0].primitive.name}): the inner optimizer and the trigger "
            "must not reduce over the replica axis themselves; leave "
            "that to the synchronizer"
        )
    if divided and _has_own_condition(jaxpr, axis_name):
        raise ValueError(
            "the inner optimizer or the trigger has a condition "
            f"that may differ between the replicas of axis {axis_name!r} (lax.cond or "
            "a while loop, as in optax.apply_if_finite), and a replica has several "
            "devices: the compiler may move arrays between them inside it, in a "
            "message that waits for the devices of all replicas. Use jnp.where; steps "
            "with gradients that are not finite adaptive_sync skips by itself"
        )
    return traced


def _decides_alone(equation: JaxprEqn, axis_name: str) -> bool:
    """Whether replicas may not take a branch, or go on with a loop, together."""
    decided_by = []
    if equation.primitive.name == "cond":
        decided_by = [equation.invars[0].aval]
    elif equation.primitive.name == "while":
        decided_by = equation.params["cond_jaxpr"].out_avals
    return any(axis_name in _collectives.varying_aval(aval) for aval in decided_by)


def _has_own_condition(jaxpr: Jaxpr, axis_name: str) -> bool:
    return any(
        _decides_alone(equation, axis_name)
        or any(_has_own_condition(x, axis_name) for x in _jaxprs.inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def require_no_deadlock(jaxpr: Jaxpr, axis_name: str | None) -> None:
    """Rejects a collective in a branch that replicas may not take together."""
    if axis_name is None:
        return
    for equation in jaxpr.eqns:
        inner = _jaxprs.inner_jaxprs(equation)
        alone = _decides_alone(equation, axis_name)
        if alone and any(
            _jaxprs.collectives_in(program, axis_name) for program in inner
        ):
            raise ValueError(
                "a collective stands inside a condition that differs between the "
                f"replicas of axis {axis_name!r}: some would wait for ever for the "
                "others. What decides by a replica's own values, such as "
                "optax.apply_if_finite or lax.cond on a loss, goes around the inner "
                "optimizer, adaptive_sync(apply_if_finite(inner), ...), and not around "
                "the optimizer that synchronises, nor around one whose factors are "
                "averaged"
            )
        for program in inner:
            require_no_deadlock(program, axis_name)


@jax.custom_batching.custom_vmap
def one_decision(which: jax.Array) -> jax.Array:
    """The decision to synchronise as it is; rejects several at once, under `vmap`."""
    return which


@one_decision.def_vmap
def _(size, batched, which):
    if batched[0]:
        raise ValueError(SEVERAL_MODELS.format(size))
    return which, batched[0]


def require_local_gradients(
    gradients: Any, axis_name: str | None, *, allow_unchecked: bool = False
) -> None:
    """Rejects gradients that were averaged over the replicas before they came here.

    Raises:
      ValueError: if a gradient is the same on all replicas by its type, so that it was
        reduced already; if nothing is tracked because of check_vma=False and that was
        not allowed; or, for axis_name=None, if gradients differ between the devices
        of an enclosing shard_map.
    """
    leaves = jax.tree.leaves_with_path(gradients)
    if axis_name is None:
        for path, leaf in leaves:
            if axes := _collectives.varying_manual_axes(leaf):
                raise ValueError(
                    f"axis_name is None, but the gradient "
                    f"{jax.tree_util.keystr(path)} differs along the mesh axis "
                    f"{', '.join(sorted(axes))}: replicas would drift apart and never "
                    f"synchronise. Pass axis_name={min(axes)!r}"
                )
        return
    _collectives.axis_size(axis_name)
    if not _collectives.is_manual(axis_name):
        return
    if not _collectives.is_checked(axis_name):
        if allow_unchecked:
            return
        raise ValueError(
            "shard_map was called with check_vma=False, so gradients that are "
            f"averaged over {axis_name!r} already cannot be told from local ones. "
            "Leave check_vma on, or use curvadion or adaptive_sync with "
            "allow_unchecked=True and make sure of it yourself"
        )
    for path, leaf in leaves:
        if not _collectives.is_varying(leaf, axis_name):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is the same on all "
                f"replicas of {axis_name!r}: it has been reduced over the axis before "
                "it got here, so every step communicates in full. Either the "
                "parameters are not replica-varying (in_specs P(): use "
                "curvadion_jax.replicas.replicate and replicas.step, which give them "
                "a leading replica axis), or the gradients go through a pmean or "
                "psum: remove it"
            )
