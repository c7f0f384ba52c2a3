"""All that is used of JAX and is not its documented interface.

JAX has no public way to ask what a program communicates, or what differs between
devices, and the promise that a local step sends nothing rests on that. Each use is here
alone, tried on JAX 0.10.2, 0.11.2 and 0.12.0, with a test in
`tests/core/test_jax_internals.py` that says what broke:

* `jax.extend.core`: programs (jaxprs), to look for collectives.
* names of primitives and of their parameters (`axes`, `axis_name`, `cond_jaxpr`,
  `length`), and the scopes in an equation's `source_info`.
* `manual_axis_type` of an array's type: over which axes it may differ.
* `jax.make_user_context`: a value by which JAX tells traces of one function apart.

(`replicas/_stray_collectives.py` reads the text of compiled programs.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    jaxpr_as_fun,
    jaxprs_in_params,
)

# What may name an axis without sending anything over it; all else counts as
# communication, so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")
# What chooses between two arrays; sums do of products with factors of 0 and 1.
_CHOICES, _SUMS = ("select_n", "cond"), ("add", "add_any", "sub")
MIXED = -1


def user_context() -> Any:
    """A context manager of a value; JAX keeps traces under different values apart."""
    return jax.make_user_context(None)


def varying(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps over which an array, or its type, may differ."""
    aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    return aval.manual_axis_type.varying


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


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs in an equation: branches, bodies, jitted functions."""
    return list(jaxprs_in_params(equation.params))


def decides_alone(equation: JaxprEqn, axis_name: str) -> bool:
    """Whether replicas may not take a branch, or repeat a loop, alike."""
    decided_by: list[Any] = []
    if equation.primitive.name == "cond":
        decided_by = [equation.invars[0].aval]
    elif equation.primitive.name == "while":
        decided_by = list(equation.params["cond_jaxpr"].out_avals)
    return any(axis_name in varying(aval) for aval in decided_by)


def _is_in(scope: str, equation: JaxprEqn) -> bool:
    return scope in str(equation.source_info.name_stack)


def named_axes(equation: JaxprEqn) -> set[Any]:
    named = set()
    for key in ("axes", "axis_name"):
        axes = equation.params.get(key, ())
        named.update(axes if isinstance(axes, tuple | list) else (axes,))
    return named


def collectives_in(
    jaxpr: Jaxpr, axis_name: str, outside: str | None = None
) -> list[JaxprEqn]:
    """The collectives over the axis in a program, but for those in a scope."""
    found = []
    for equation in jaxpr.eqns:
        if outside and _is_in(outside, equation):
            continue
        name = equation.primitive.name
        if name not in _SILENT and axis_name in named_axes(equation):
            found.append(equation)
        for program in inner_jaxprs(equation):
            found.extend(collectives_in(program, axis_name, outside))
    return found


def _is_update(equation: JaxprEqn, scope: str) -> bool:
    return equation.primitive.name == "custom_vmap_call" and _is_in(scope, equation)


def updates_in(jaxpr: Jaxpr, scope: str) -> int:
    """How many updates of optimizers that synchronise a step's program makes.

    One in a condition or a while loop is refused. `scope` is that around an update.
    """
    found = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if _is_update(equation, scope):
            found += 1
            continue
        inside = sum(updates_in(each, scope) for each in inner_jaxprs(equation))
        if inside and name in ("cond", "while"):
            raise ValueError(
                "The optimizer's update is inside a lax.cond or while_loop, as by "
                "optax.MultiSteps, and replicas.step would run every branch. Put the "
                "condition inside, adaptive_sync(optax.apply_if_finite(inner, 3), "
                "...), and accumulate gradients by optax.microbatch."
            )
        found += inside * equation.params.get("length", 1)
    return found


def reduced_inputs(
    jaxpr: Jaxpr, axis_name: str, scope: str, given: Sequence[bool] = ()
) -> set[int]:
    """Which inputs of a step's updates come from a collective over the axis.

    `given` says of the program's inputs whether they do.
    """
    found: set[int] = set()
    reduced = {x for x, yes in zip(jaxpr.invars, given, strict=False) if yes}
    for equation in jaxpr.eqns:
        hit = [not isinstance(x, Literal) and x in reduced for x in equation.invars]
        if _is_update(equation, scope):
            found.update(i for i, yes in enumerate(hit) if yes)
            continue
        inner, sends = inner_jaxprs(equation), axis_name in named_axes(equation)
        for program in inner:
            # The predicate of a condition comes before what its branches get.
            inputs = hit[max(len(hit) - len(program.invars), 0) :]
            found |= reduced_inputs(program, axis_name, scope, inputs)
            sends |= bool(collectives_in(program, axis_name, scope))
        if any(hit) or (sends and equation.primitive.name not in _SILENT):
            reduced.update(equation.outvars)
    return found


def sources(jaxpr: Jaxpr, scope: str) -> list[int | None]:
    """Which input each result of a step is, handed through; else None, or MIXED.

    Followed back through jitted functions, loops, and equations of one operand.

    Args:
      jaxpr: the program.
      scope: name of the scope around an update.
    """
    made_by = {x: (e, i) for e in jaxpr.eqns for i, x in enumerate(e.outvars)}
    inputs = {x: i for i, x in enumerate(jaxpr.invars)}
    of_bodies: dict[int, list[int | None]] = {}

    def is_product(variable: Any) -> bool:
        return (
            not isinstance(variable, Literal)
            and variable in made_by
            and made_by[variable][0].primitive.name == "mul"
        )

    def source(variable: Any) -> int | None:
        while not isinstance(variable, Literal) and variable in made_by:
            equation, index = made_by[variable]
            name, operands = equation.primitive.name, equation.invars
            if name in _CHOICES or (name in _SUMS and all(map(is_product, operands))):
                return MIXED
            inner = inner_jaxprs(equation)
            if _is_update(equation, scope) or not (inner or len(operands) == 1):
                return None
            position = 0
            if inner:
                body = inner[-1]  # A while loop has its condition in front of it.
                if id(equation) not in of_bodies:
                    of_bodies[id(equation)] = sources(body, scope)
                found = of_bodies[id(equation)][index]
                if found is None or found == MIXED:
                    return found
                if len(body.invars) != len(operands):
                    return None
                position = found
            variable = operands[position]
        return None if isinstance(variable, Literal) else inputs.get(variable)

    return [source(x) for x in jaxpr.outvars]
