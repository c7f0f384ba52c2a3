"""Undocumented parts of JAX that the library uses, all in this file.

JAX has no public way to ask what a program communicates or what differs between
devices, and the checks that a local step sends nothing need both. This was tried on JAX
0.10.2, 0.11.2 and 0.12.0; `tests/core/test_jax_internals.py` tells what broke:

* `jax.extend.core`: programs (jaxprs), to look for collectives.
* names of primitives and of their parameters (`axes`, `axis_name`, `cond_jaxpr`,
  `length`, `in_tree`, `cond_nconsts`), and the scopes in an equation's `source_info`.
* `manual_axis_type` of an array's type: over which axes it may differ.
* `jax.make_user_context`: a value by which JAX tells traces of one function apart.

(`replicas/_stray_collectives.py` reads the text of compiled programs.)
"""

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
_COMPUTED, _NO_INPUTS = frozenset([COMPUTED]), frozenset([COMPUTED, MIXED])
# Name scope of the optimizer's own communication.
SCOPE = "curvadion_jax.update"


# Makes a context manager of a value; JAX does not share traces between values.
user_context = jax.make_user_context


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


def sources(
    jaxpr: Jaxpr, known: dict[Jaxpr, Any] | None = None
) -> tuple[list[Sources], Sources]:
    """The inputs that each result of a step may be, and those that are parameters.

    It finds steps that keep the old state on a condition. Inputs have their index;
    COMPUTED stands for any other array, MIXED for a choice: of inputs x and y the
    result ``x`` is {0}, ``-x`` {COMPUTED}, ``where(c, x, y)`` {0, 1, MIXED}, and so is
    ``c * x + (1 - c) * y``. They are followed through choices, jitted functions, loops
    that hand an array through, and equations of one operand. Parameters are those that
    an optimizer that synchronises is given. `known` has what was found of programs
    inside.
    """
    known = {} if known is None else known
    found: dict[Any, Sources] = {x: frozenset([i]) for i, x in enumerate(jaxpr.invars)}
    factors: dict[Any, Sequence[Any]] = {}  # of products
    params = Sources()

    def source(variable: Any) -> Sources:
        is_literal = isinstance(variable, Literal)
        return _COMPUTED if is_literal else found.get(variable, _COMPUTED)

    def union(variables: Iterable[Any], *others: int) -> Sources:
        return frozenset(others).union(*map(source, variables))

    for equation in jaxpr.eqns:  # In their order: recursion would be too deep.
        name, operands = equation.primitive.name, equation.invars
        results: list[Any] = [_COMPUTED] * len(equation.outvars)
        variables = [None if isinstance(x, Literal) else x for x in operands]
        products = [factors.get(x, ()) for x in variables]
        if name == "mul":
            factors[equation.outvars[0]] = operands
        elif name == "select_n":
            results = [union(operands[1:], MIXED)]
        elif name in _SUMS and all(products):
            results = [union(itertools.chain(*products), MIXED)]
        elif _is_update(equation):
            _, given = jax.tree.unflatten(equation.params["in_tree"], operands)
            params |= union(jax.tree.leaves(given[2]))
        elif bodies := _bodies(equation):
            operands = operands[len(operands) - len(bodies[0].invars) :]
            for body in bodies:
                known[body] = known.get(body) or sources(body, known)
            inner = zip(*([*known[x][0], known[x][1]] for x in bodies), strict=True)
            *results, inside = (
                union((operands[i] for i in each if i >= 0), *each & _NO_INPUTS)
                for each in (Sources().union(*of_bodies) for of_bodies in inner)
            )
            results = [x | {MIXED} for x in results] if name == "cond" else results
            params |= inside
        elif len(operands) == 1:
            each = source(operands[0])
            kept = each if name in _COPIES else each & {MIXED} | _COMPUTED
            results = [kept] * len(results)
        found.update(zip(equation.outvars, results, strict=True))
    return [source(x) for x in jaxpr.outvars], params


def _bodies(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs of which one gives an equation's results.

    Not those of kernels, which write into references.
    """
    name, bodies = equation.primitive.name, list(jaxprs_in_params(equation.params))
    # Operands in front of a body's are a condition, or a while loop's condition's.
    first = 1 if name == "cond" else equation.params.get("cond_nconsts", 0)
    sizes = len(equation.invars) - first, len(equation.outvars)
    bodies = bodies if name == "cond" else bodies[-1:]
    return [x for x in bodies if (len(x.invars), len(x.outvars)) == sizes]
