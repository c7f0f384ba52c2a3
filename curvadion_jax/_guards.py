"""Trace-time checks: local steps stay local, nothing can hang, gradients are local.

Inspects each branch's jaxpr before it is used, and rejects collectives over the replica
axis where there may be none, or where replicas may not come together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from curvadion_jax import _collectives

# Around the optimizer's own communication, in the names of a program's equations.
SCOPE = "curvadion_jax.update"
SEVERAL_MODELS = (
    "update runs under vmap, for {} models: a condition with several decisions runs "
    "both of its branches, so that every step would send all that a sync sends. Give "
    "one update the parameters of all models, stacked: leading axes are stacks of "
    "matrices"
)
# What may name an axis without sending anything over it; all else counts as
# communication, so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")


def switch(
    which: jax.Array,
    local: Callable[..., Any],
    syncs: Sequence[Callable[..., Any]],
    *operands: Any,
    axis_name: str | None,
    divided: bool = False,
) -> Any:
    """`lax.cond` around collectives, that cannot hang and keeps local steps local.

    Args:
      which: int32[], the same on all replicas: 0 is the local branch, v the v-th sync.
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
    require_shared(which, axis_name)
    traced = trace_local(local, *operands, axis_name=axis_name, divided=divided)
    branches = [traced]
    for sync in syncs:
        branch = trace(sync, *operands)
        require_no_deadlock(branch.program.jaxpr, axis_name)
        branches.append(branch)
    axes = axes_of_results(branches)

    def marked(branch):
        return lambda *args: _collectives.vary(
            _collectives.vary_over(branch(*args), axes), axis_name
        )

    functions = [marked(branch) for branch in branches]
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


class Traced(NamedTuple):
    """A function as a program: inspected once, and run without tracing it again."""

    program: ClosedJaxpr
    result: Any

    def __call__(self, *operands: Any) -> Any:
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def trace(function: Callable[..., Any], *operands: Any) -> Traced:
    """The program of a function; one that is traced already as it is."""
    if isinstance(function, Traced):
        return function
    return Traced(*jax.make_jaxpr(function, return_shape=True)(*operands))


def trace_local(
    function: Callable[..., Any], *operands: Any, axis_name: str | None, divided: bool
) -> Traced:
    """The program of a function that must not communicate over the axis."""
    traced = trace(function, *operands)
    if axis_name is None:
        return traced
    jaxpr = traced.program.jaxpr
    if found := collectives_in(jaxpr, axis_name):
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


def axes_of_results(branches: Sequence[Traced]) -> list[frozenset[str]]:
    """For every result the axes over which that of any branch differs."""
    for traced in branches[1:]:
        _require_same_result(traced.result, branches[0].result)
    avals = zip(*(traced.program.out_avals for traced in branches), strict=True)
    return [
        frozenset().union(*map(_collectives.varying_aval, results)) for results in avals
    ]


def _require_same_result(synced: Any, local: Any) -> None:
    if jax.tree.structure(synced) != jax.tree.structure(local):
        raise ValueError(
            "a sync step and a local step return different trees:\n"
            f"{jax.tree.structure(synced)}\n{jax.tree.structure(local)}"
        )
    pairs = zip(jax.tree.leaves_with_path(synced), jax.tree.leaves(local), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"a sync step returns {a.dtype}{list(a.shape)} and a local step "
                f"{b.dtype}{list(b.shape)} at {jax.tree_util.keystr(path)}: an "
                "optimizer must keep the shapes and dtypes of its state and updates"
            )


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    values = jax.tree.leaves(list(equation.params.values()))
    values = [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values]
    return [value for value in values if isinstance(value, Jaxpr)]


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
        or any(_has_own_condition(x, axis_name) for x in inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def require_no_deadlock(jaxpr: Jaxpr, axis_name: str | None) -> None:
    """Rejects a collective in a branch that replicas may not take together."""
    if axis_name is None:
        return
    for equation in jaxpr.eqns:
        inner = inner_jaxprs(equation)
        alone = _decides_alone(equation, axis_name)
        if alone and any(collectives_in(program, axis_name) for program in inner):
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


def named_axes(equation: JaxprEqn) -> set[Any]:
    named = set()
    for key in ("axes", "axis_name"):
        axes = equation.params.get(key, ())
        named.update(axes if isinstance(axes, tuple | list) else (axes,))
    return named


def collectives_in(
    jaxpr: Jaxpr, axis_name: str, outside: str | None = None
) -> list[JaxprEqn]:
    """The collectives over the axis in a program, nested ones included.

    Args:
      jaxpr: the program.
      axis_name: replica axis.
      outside: name of a scope; what is in it is left out.
    """
    found = []
    for equation in jaxpr.eqns:
        if outside and outside in str(equation.source_info.name_stack):
            continue
        name = equation.primitive.name
        if name not in _SILENT and axis_name in named_axes(equation):
            found.append(equation)
        for program in inner_jaxprs(equation):
            found.extend(collectives_in(program, axis_name, outside))
    return found


def bytes_given(equation: JaxprEqn) -> int:
    """Bytes of the arrays that an equation is given."""
    avals: list[Any] = [x.aval for x in equation.invars]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


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
