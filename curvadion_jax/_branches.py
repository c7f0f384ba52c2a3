"""Conditionals around collectives, which cannot hang and keep quiet steps quiet.

What a program holds is looked at before it is used: a branch that may not communicate
does not, and none that does stands where replicas may not come together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from curvadion_jax import _collectives, _sharding

# What may name an axis without sending anything over it; all else counts as
# communication, so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")


def switch(
    which: jax.Array,
    quiet: Callable[..., Any],
    syncs: Sequence[Callable[..., Any]],
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """`lax.switch` around collectives, that cannot hang and keeps quiet steps quiet.

    Args:
      which: int32[], the same on all replicas: 0 is quiet, v the v-th of the syncs.
      quiet: branch that may not communicate over the axis.
      syncs: branches that may.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.

    Returns:
      What the chosen branch returns, marked as varying over the axis.

    Raises:
      ValueError: if the choice may differ between replicas (the program would wait
        for ever), if the quiet branch holds a collective over the axis, or if the
        branches return different shapes or dtypes.
    """
    _require_shared(which, axis_name)
    silent = _trace(quiet, *operands)
    _refuse_collectives(silent, axis_name)
    _refuse_own_conditions(silent, axis_name)
    loud = _trace_syncs(syncs, silent.result, *operands, axis_name=axis_name)
    return _branch(which, [silent, *loud], *operands, axis_name=axis_name)


def then_sync(
    which: jax.Array,
    syncs: Sequence[Callable[..., Any]],
    done: Any,
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """What a quiet step has done, or what a sync makes of it; cannot hang.

    A loop of one pass or none. XLA copies much of what a conditional hands through
    (https://github.com/jax-ml/jax/issues/39449); what goes through a loop that does not
    run stays where it is. The conditional inside keeps XLA from computing in front of
    the loop what a sync needs and no pass changes.

    Args:
      which: int32[], the same on all replicas: 0 is quiet, v the v-th of the syncs.
      syncs: functions of `done` and the operands that may communicate over the axis.
      done: tree of arrays.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.

    Returns:
      A tree like `done`, marked as varying over the axis.

    Raises:
      ValueError: as :func:`switch`.
    """
    _require_shared(which, axis_name)
    done = _collectives.vary(done, axis_name)
    silent = _trace(lambda done, *_: done, done, *operands)
    loud = _trace_syncs(syncs, silent.result, done, *operands, axis_name=axis_name)
    axes = _axes_of_results([silent, *loud])
    if axes != _axes_of_results([silent]):  # a loop hands on what it began with
        done = _collectives.vary_over(done, axes)
        silent = _trace(lambda done, *_: done, done, *operands)
        loud = _trace_syncs(syncs, silent.result, done, *operands, axis_name=axis_name)

    def once(_, done):
        branches = [silent, *loud]
        return _branch(which, branches, done, *operands, axis_name=axis_name)

    passes = jnp.minimum(which, 1)
    return lax.fori_loop(0, passes, once, done)


def local_switch(
    which: jax.Array,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """`lax.switch` of which no branch communicates over the axis.

    Where a replica has several devices `which` is to be the same on all replicas: the
    compiler may let these devices talk to each other inside a branch.

    Raises:
      ValueError: if a branch would communicate over the axis.
    """
    traced = [_trace(branch, *operands) for branch in branches]
    for each in traced:
        _refuse_collectives(each, axis_name)
    return _branch(which, traced, *operands, axis_name=axis_name)


def _require_shared(which: jax.Array, axis_name: str | None) -> None:
    if axis_name is not None and _collectives.is_varying(which, axis_name):
        raise ValueError(
            f"the decision to synchronise differs between the replicas of axis "
            f"{axis_name!r}; some would wait for ever for the others: reduce it over "
            "the axis first"
        )


def _trace_syncs(
    syncs: Sequence[Callable[..., Any]], quiet: Any, *operands: Any, axis_name
) -> list["_Traced"]:
    """The syncs as programs that cannot hang and return what a quiet step does."""
    branches = []
    for sync in syncs:
        loud = _trace(sync, *operands)
        if axis_name is not None and _hangs(loud.program.jaxpr, axis_name):
            raise ValueError(
                "a synchronised step communicates inside a condition that differs "
                f"between the replicas of axis {axis_name!r}; some would wait for ever "
                "for the others. Wrappers that decide by a replica's own values, such "
                "as optax.apply_if_finite, do not go around an optimizer whose factors "
                "are averaged: use another synchronizer, or leave the wrapper out"
            )
        _require_same_result(loud.result, quiet)
        branches.append(loud)
    return branches


def _branch(
    which: jax.Array, branches: Sequence["_Traced"], *operands: Any, axis_name
) -> Any:
    axes = _axes_of_results(branches)

    def marked(traced):
        return lambda *args: _collectives.vary(
            _collectives.vary_over(traced(*args), axes), axis_name
        )

    functions = [marked(traced) for traced in branches]
    if len(functions) == 2:
        return lax.cond(which > 0, *reversed(functions), *operands)
    return lax.switch(which, functions, *operands)


def _axes_of_results(branches: Sequence["_Traced"]) -> list[frozenset[str]]:
    """For every result the axes over which that of any branch differs."""
    avals = zip(*(traced.program.out_avals for traced in branches), strict=True)
    return [
        frozenset().union(*map(_collectives.varying_aval, results)) for results in avals
    ]


class _Traced(NamedTuple):
    """A function as a program: looked at once, and run without tracing it again."""

    program: ClosedJaxpr
    result: Any

    def __call__(self, *operands: Any) -> Any:
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def _trace(function: Callable[..., Any], *operands: Any) -> _Traced:
    return _Traced(*jax.make_jaxpr(function, return_shape=True)(*operands))


def _require_same_result(synced: Any, still: Any) -> None:
    if jax.tree.structure(synced) != jax.tree.structure(still):
        raise ValueError(
            "a synchronised and a quiet step return different trees:\n"
            f"{jax.tree.structure(synced)}\n{jax.tree.structure(still)}"
        )
    pairs = zip(jax.tree.leaves_with_path(synced), jax.tree.leaves(still), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"a synchronised step returns {a.dtype}{list(a.shape)} and a quiet "
                f"step {b.dtype}{list(b.shape)} at {jax.tree_util.keystr(path)}: an "
                "optimizer must keep the shapes and dtypes of its state and updates"
            )


def _inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
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
        or any(_has_own_condition(x, axis_name) for x in _inner_programs(equation))
        for equation in jaxpr.eqns
    )


def _hangs(jaxpr: Jaxpr, axis_name: str) -> bool:
    """Whether a collective stands in a branch that replicas may not take together."""
    for equation in jaxpr.eqns:
        inner = _inner_programs(equation)
        local = _decides_alone(equation, axis_name)
        if local and any(_collectives_in(program, axis_name) for program in inner):
            return True
        if any(_hangs(program, axis_name) for program in inner):
            return True
    return False


def _named_axes(equation: JaxprEqn) -> set[Any]:
    named = set()
    for key in ("axes", "axis_name"):
        axes = equation.params.get(key, ())
        named.update(axes if isinstance(axes, tuple | list) else (axes,))
    return named


def _collectives_in(jaxpr: Jaxpr, axis_name: str) -> list[str]:
    """Names of the collectives over the axis in a program, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in _SILENT and axis_name in _named_axes(equation):
            found.append(name)
        for program in _inner_programs(equation):
            found.extend(_collectives_in(program, axis_name))
    return found


def _refuse_collectives(traced: _Traced, axis_name: str | None) -> None:
    found = (
        [] if axis_name is None else _collectives_in(traced.program.jaxpr, axis_name)
    )
    if found:
        raise ValueError(
            f"a quiet step would communicate over the axis {axis_name!r} ({found[0]}): "
            "the inner optimizer, the local step, the trigger and a settled of your "
            "own must not reduce over the replica axis themselves; leave that to the "
            "synchronizer, and pass the inner optimizer axis_name=None"
        )


def _refuse_own_conditions(traced: _Traced, axis_name: str | None) -> None:
    if axis_name is None or not _sharding.inner_axes():
        return
    if _has_own_condition(traced.program.jaxpr, axis_name):
        raise ValueError(
            "the inner optimizer, the local step or the trigger has a condition that "
            f"may differ between the replicas of axis {axis_name!r} (lax.cond or a "
            "while loop, as in optax.apply_if_finite), and a replica has several "
            "devices: the compiler may move arrays between them inside it, in a "
            "message that waits for the devices of all replicas. Use jnp.where; steps "
            "with gradients that are not finite adaptive_sync leaves out by itself"
        )


def run_locally(
    function: Callable[..., Any], *operands: Any, axis_name: str | None
) -> Any:
    """Result of a computation that must stay on its replica.

    Raises:
      ValueError: if it would communicate over the axis, or decide by what differs
        between replicas of several devices.
    """
    if axis_name is None:
        return function(*operands)
    traced = _trace(function, *operands)
    _refuse_collectives(traced, axis_name)
    _refuse_own_conditions(traced, axis_name)
    return traced(*operands)
