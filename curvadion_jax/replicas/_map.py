"""Runs a function of one replica on the rows of all, and nothing can cross."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from curvadion_jax import _trees
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._rows import AXIS, Replicas
from curvadion_jax.step._sync_state import AdaptiveSyncState


def map(function: Callable[..., Any], mesh: Replicas) -> Callable[..., Any]:
    """Applies a function of one replica to all of them.

    Each replica computes with its own row, and nothing is sent between replicas. What
    is `jax.value_and_grad` of a loss for one replica becomes that of all, and their
    gradients are local by construction.

    Args:
      function: of one replica's arrays, such as ``jax.value_and_grad(loss_fn)``.
      mesh: from :func:`make_mesh` or :func:`simulated`; None is one replica, whose
        arrays have no axis of replicas: then `function` is called as it is.

    Returns:
      A function. Its positional arguments are rows, arrays [R, ...], of which
      `function` is given one, [...]. Its keyword arguments are common: each replica is
      given all of them. All are traced, so ``if train:`` would fail for a keyword
      ``train=True``: close over what is static,
      ``map(functools.partial(function, train=True), mesh)``. Results are rows.

    Raises:
      ValueError: if an argument has no row for each replica; if the function takes or
        returns the state of an optimizer of this library; if it uses
        traced values, or rows, that are not its arguments, such as a batch from
        outside, of which every replica would take all; if it communicates over the
        replica axis; or if the result is differentiated. Differentiate inside,
        ``map(jax.grad(f), mesh)``.

    Warns:
      UserWarning: if an argument by keyword, or an array that the function uses and is
        not given (of a closure, an object, a default or a global one), looks like rows
        or is a random key; if the function changes an object in place, such as an nnx
        module, and seems not to return the change. A key that the function makes
        itself is not detected.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.simulated(2)
      >>> loss_fn = lambda w, x, scale: scale * jnp.sum(w * x)
      >>> gradients = map(jax.grad(loss_fn), mesh)
      >>> w, batch = jnp.ones((2, 3)), jnp.array([[1.0, 2, 3], [4, 5, 6]])
      >>> gradients(w, batch, scale=10.0).tolist()
      [[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]]
    """
    _rows.check_mesh(mesh)
    if mesh is None:
        return function

    constants: list[Any] = []  # of the last trace, until they are looked at

    def watched(*rows, **common):
        arguments = [*rows, *common.values()]
        before = [jax.tree.leaves(x) for x in arguments]
        results = function(*rows, **common)
        for argument, old in zip(arguments, before, strict=True):
            if not isinstance(argument, dict | list | tuple):  # an object
                _warn_of_lost(old, jax.tree.leaves(argument), results)
        return results

    def of_one(rows, common):
        # Traced once, looked at, and then called.
        trace = jax.make_jaxpr(watched, return_shape=True)
        try:
            program, shapes = trace(*rows, **common)
        except Exception as error:
            if advice := _advice(error):
                raise ValueError(advice) from error
            _explain(error, function)
            raise
        programs = [*_programs(program)]
        found = [x for each in programs for x in getattr(each, "consts", ())]
        found = [x if isinstance(x, jax.Array) else np.asarray(x) for x in found]
        _refuse_captured(found)
        # A replica that asks for its number may fold it into a key.
        asks = _refuse_collectives(programs)
        constants[:] = [x for x in found if not (asks and _trees.may_be_key(x))]
        results = jaxpr_as_fun(program)(*jax.tree.leaves((rows, common)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results), ()

    mapped = over_model(of_one, mesh)

    @jax.custom_jvp
    def run_rows(rows, common):
        return mapped(rows, common)[0]

    @run_rows.defjvp
    def _(primals, tangents):
        raise ValueError(
            "replicas.map is differentiated from outside. A mean over the replicas, "
            f"of which there are {_rows.count(mesh)}, would divide every gradient by "
            "their number. Differentiate inside: "
            "replicas.map(jax.grad(loss_fn), mesh)(params, batch)."
        )

    def run(*rows, **common):
        _refuse_optimizers((rows, common))
        for index, argument in enumerate(rows):
            _rows.check_rows(argument, mesh, f"Argument {index}")
        _rows.check_common(common, mesh)
        results = run_rows(rows, common)
        _refuse_optimizers(results)
        if _rows.count(mesh) > 1:
            _warn_of_captured(constants, _cells(function), mesh)
        constants.clear()
        return results

    return run


def over_model(function: Callable[..., Any], mesh: Replicas) -> Callable[..., Any]:
    """`_rows.over`, for arrays that lie over Explicit axes as the model says."""
    if _rows.explicit_axes(mesh):
        # JAX gathers arrays over Explicit axes at the boundary of a shard_map.
        return jax.jit(
            jax.vmap(function, (0, None), axis_name=AXIS, spmd_axis_name=AXIS)
        )
    return _rows.over(function, mesh)


def _cells(function: Callable[..., Any]) -> list[Any]:
    """What a function closes over or a partial holds, but for cells empty yet."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return given + _cells(function.func)
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _advice(error: Exception) -> str:
    """What to say in place of JAX, whose advice does not apply here."""
    text = str(error)
    if isinstance(error, NameError) and "unbound axis name" in text:
        axis = text.rpartition("unbound axis name: ")[2].partition(". ")[0]
        return (
            f"The function given to replicas.map communicates over an axis {axis!r}, "
            "which no vmap in it has. The optimizer averages, at syncs: drop the pmean "
            "from the loss and the gradients, and average metrics after map."
        )
    if isinstance(error, ValueError) and text.startswith("Resource axis:"):
        return (
            f"A sharding in the function given to replicas.map does not fit: {text} "
            "Where boxes of nn.with_partitioning hold it, take them off, "
            "flax.linen.meta.unbox(params), or make a mesh with these axes."
        )
    return ""


def _explain(error: Exception, function: Callable[..., Any]) -> None:
    """Adds a note to an error of a model that was given all rows by a closure."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(_cells(function))):
        error.add_note(
            "The function given to replicas.map is a closure over traced values, which "
            "have all rows, [R, ...]. Pass them as arguments: "
            "replicas.map(f, mesh)(params, batch)."
        )


def _warn_of_lost(before: Sequence[Any], after: Sequence[Any], results: Any) -> None:
    """Warns of an object that a function changes and does not return, as nnx modules.

    Each replica's arguments are new objects, so the change is gone after the call.
    """
    old, kept = {id(x) for x in before}, {id(x) for x in after}
    returned = {id(x) for x in jax.tree.leaves(results)}
    if not old <= kept and not kept - old <= returned:
        warnings.warn(
            "The function given to replicas.map changes an argument in place, such as "
            "the statistics of an nnx BatchNorm or the keys of its Dropout, and seems "
            "not to return what it changed: that is lost. Split the module outside, "
            "graph, state = nnx.split(module), merge it inside, and return "
            "nnx.state(module) too.",
            stacklevel=2,
        )


def _refuse_optimizers(tree: Any) -> None:
    """Refuses a mapped step or `init`, with which each replica would train alone."""
    if _trees.nodes_of(AdaptiveSyncState, tree):
        raise ValueError(
            "The function given to replicas.map takes or returns the state of an "
            "optimizer of this library, which is of rows already: mapped, each replica "
            "would train alone. Map the loss only, replicas.map(jax.value_and_grad("
            "loss_fn), mesh), and give mesh= to the optimizer."
        )


def _refuse_captured(constants: Any) -> None:
    captured = [
        jax.typeof(x).str_short()
        for x in constants
        if isinstance(x, Tracer) or _rows.has_rows(x)
    ]
    if captured:
        raise ValueError(
            "The function given to replicas.map uses arrays that are not its "
            f"arguments: {', '.join(captured[:3])}. Each replica would take all "
            "of them. Pass rows as arguments, map(f, mesh)(params, batch), and what is "
            "common by keyword, map(f, mesh)(params, batch, step=step)."
        )


def _warn_of_captured(
    constants: Sequence[Any], cells: Sequence[Any], mesh: Replicas
) -> None:
    """Warns of random keys, and of what looks like rows: on one device nobody knows.

    Of a closure that is each thing that it closes over. All else, such as a global
    array, is known as a constant of the program, among which are also small tables.
    """
    if any(_trees.may_be_key(x) for x in constants):
        warnings.warn(
            "The function given to replicas.map uses a random key that is not its "
            "argument, with which all replicas draw the same numbers, as of dropout, "
            "unless it folds in jax.lax.axis_index. Pass jax.random.split(key, "
            "replicas) by position.",
            stacklevel=3,
        )
    tables = [x for x in constants if jnp.ndim(x) > 1]
    for captured in (*cells, tables):
        leaves = jax.tree.leaves(captured)
        is_known = any(isinstance(x, Tracer) or _rows.has_rows(x) for x in leaves)
        if not is_known and _rows.look_like_rows(captured, mesh):
            warnings.warn(
                "The function given to replicas.map uses an array of shape "
                f"{leaves[0].shape} that is not its argument, and each replica takes "
                "all of it. If it is a row for each replica, pass it as an argument.",
                stacklevel=3,
            )
            return


def _programs(program: Any) -> Iterator[Any]:
    """A traced program and all programs inside of it."""
    yield program
    is_program = lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
    for equation in getattr(program, "jaxpr", program).eqns:
        given = [*equation.params.values()]
        for inner in jax.tree.leaves(given, is_leaf=is_program):
            if is_program(inner):
                yield from _programs(inner)


def _refuse_collectives(programs: Sequence[Any]) -> bool:
    """Looks for communication over the replica axis.

    Returns:
      Whether a program asks for the number of its replica.
    """
    asks = False
    for equation in (x for each in programs for x in getattr(each, "jaxpr", each).eqns):
        given = equation.params
        axes = jax.tree.leaves([given.get("axes", ()), given.get("axis_name", ())])
        asks |= AXIS in axes
        if AXIS in axes and equation.primitive.name != "axis_index":
            raise ValueError(
                f"The function given to replicas.map calls {equation.primitive.name} "
                f"over {AXIS!r}. The optimizer averages, at syncs: drop the pmean from "
                "the loss and the gradients, and average metrics after map."
            )
    return asks
