"""Undocumented parts of JAX that the library uses, all in this file.

JAX has no public way to ask what a program communicates or what differs between
devices, and the checks that a local step sends nothing need both. This was tried on JAX
0.10.2, 0.11.2 and 0.12.0; `tests/core/test_jax_internals.py` tells what broke:

* `jax.extend.core`: programs (jaxprs), to look for collectives.
* names of primitives and of their parameters (`axes`, `axis_name`, `cond_jaxpr`,
  `length`), and the scopes in an equation's `source_info`.
* `manual_axis_type` of an array's type: over which axes it may differ.
* `jax.make_user_context`: a value by which JAX tells traces of one function apart.

(`replicas/_stray_collectives.py` reads the text of compiled programs.)
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Primitives that may name an axis and send nothing. All others count as communication,
# so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")
# Sums of products, which choose where factors are 0 and 1.
_SUMS = ("add", "add_any", "sub")
# Primitives that leave the numbers of their only operand as they are.
_COPIES = ("convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim")
_COPIES += ("sharding_constraint", "reshard", "optimization_barrier", "pvary")
COMPUTED, MIXED = -1, -2  # in place of an input's index
Sources = frozenset[int]
# Name scope of the optimizer's own communication.
SCOPE = "curvadion_jax.update"


def user_context() -> Any:
    """Makes a context manager of a value; JAX does not share traces between values."""
    return jax.make_user_context(None)


def varying(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps over which an array, or its type, may differ."""
    aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    return aval.manual_axis_type.varying


class Traced(NamedTuple):
    """A traced function, which can be inspected and run without tracing it again."""

    program: ClosedJaxpr
    result: Any

    def __call__(self, *operands: Any) -> Any:
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def trace(function: Callable[..., Any], *operands: Any) -> Traced:
    """Traces a function, unless it is traced already."""
    if isinstance(function, Traced):
        return function
    return Traced(*jax.make_jaxpr(function, return_shape=True)(*operands))


def equations(
    jaxpr: Jaxpr, around: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, tuple[JaxprEqn, ...]]]:
    """Yields every equation of a program, and those around it, outermost first."""
    for equation in jaxpr.eqns:
        yield equation, around
        for program in jaxprs_in_params(equation.params):
            yield from equations(program, (*around, equation))


def communicates(equation: JaxprEqn, axis_name: str) -> bool:
    """Whether the equation itself is a collective over the axis."""
    named = jax.tree.leaves([equation.params.get(x) for x in ("axes", "axis_name")])
    return equation.primitive.name not in _SILENT and axis_name in named


def collectives_in(jaxpr: Jaxpr, axis_name: str) -> list[JaxprEqn]:
    """The collectives over the axis in a program."""
    return [each for each, _ in equations(jaxpr) if communicates(each, axis_name)]


def decides_alone(equation: JaxprEqn, axis_name: str) -> bool:
    """Whether replicas may take different branches, or repeat a loop differently."""
    decided_by: list[Any] = []
    if equation.primitive.name == "cond":
        decided_by = [equation.invars[0].aval]
    elif equation.primitive.name == "while":
        decided_by = list(equation.params["cond_jaxpr"].out_avals)
    return any(axis_name in varying(aval) for aval in decided_by)


def _is_update(equation: JaxprEqn) -> bool:
    in_scope = SCOPE in str(equation.source_info.name_stack)
    return equation.primitive.name == "custom_vmap_call" and in_scope


def updates_in(jaxpr: Jaxpr) -> int:
    """Counts updates of optimizers that synchronise; rejects one in a condition."""
    found = [around for each, around in equations(jaxpr) if _is_update(each)]
    if {x.primitive.name for around in found for x in around} & {"cond", "while"}:
        raise ValueError(
            "The optimizer's update is inside a lax.cond or while_loop, as by "
            "optax.MultiSteps, and replicas.step would run every branch. Put the "
            "condition inside, adaptive_sync(optax.apply_if_finite(inner, 3), "
            "...), and accumulate gradients by optax.microbatch."
        )
    return sum(math.prod(x.params.get("length", 1) for x in xs) for xs in found)


def sources(jaxpr: Jaxpr) -> tuple[list[Sources], Sources]:
    """The inputs that each result of a step may be, and those of optimizers' updates.

    Inputs have their index; COMPUTED stands for any other array, MIXED for a choice.
    Results are followed back through choices, jitted functions, loops that hand an
    array through, and equations of one operand.
    """
    inputs = {x: i for i, x in enumerate(jaxpr.invars)}
    made_by = {x: (e, i) for e in jaxpr.eqns for i, x in enumerate(e.outvars)}
    of_body = functools.cache(sources)

    def union(variables: Iterable[Any], *others: int) -> Sources:
        return frozenset(others).union(*map(source, variables))

    def outside(found: Sources, body: Jaxpr, equation: JaxprEqn) -> Sources:
        """What are sources in a body of an equation, as sources around it."""
        operands = equation.invars[equation.primitive.name == "cond" :]
        if len(body.invars) != len(operands):  # A while loop has a condition's, too.
            return frozenset(min(i, COMPUTED) for i in found)
        return union((operands[i] for i in found if i >= 0), *found & {COMPUTED, MIXED})

    def factors(variable: Any) -> Sequence[Any]:
        made = None if isinstance(variable, Literal) else made_by.get(variable)
        return made[0].invars if made and made[0].primitive.name == "mul" else ()

    def source(variable: Any) -> Sources:
        is_literal = isinstance(variable, Literal)
        return frozenset([COMPUTED]) if is_literal else of_variable(variable)

    @functools.cache
    def of_variable(variable: Any) -> Sources:
        if variable not in made_by:
            return frozenset([inputs.get(variable, COMPUTED)])
        equation, index = made_by[variable]
        name, operands = equation.primitive.name, equation.invars
        if name == "select_n":
            return union(operands[1:], MIXED)
        products = [factors(x) for x in operands] if name in _SUMS else []
        if products and all(products):
            return union(itertools.chain(*products), MIXED)
        if bodies := _bodies(equation):
            found = [outside(of_body(x)[0][index], x, equation) for x in bodies]
            return frozenset([MIXED] if name == "cond" else []).union(*found)
        found = source(operands[0]) if len(operands) == 1 else frozenset([COMPUTED])
        return found if name in _COPIES else found & {MIXED} | {COMPUTED}

    given: Sources = frozenset()
    for equation in jaxpr.eqns:
        if _is_update(equation):
            given |= union(equation.invars)
        for body in _bodies(equation):
            given |= outside(of_body(body)[1], body, equation)
    return [source(x) for x in jaxpr.outvars], given


def _bodies(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs of which one gives an equation's results."""
    if _is_update(equation):
        return []
    # A while loop has its condition in front of its body.
    last = slice(None) if equation.primitive.name == "cond" else slice(-1, None)
    return list(jaxprs_in_params(equation.params))[last]
