"""Functions as programs: traced once, and searched for what they communicate."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    jaxpr_as_fun,
    jaxprs_in_params,
)

from curvadion_jax import _collectives

# What may name an axis without sending anything over it; all else counts as
# communication, so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")


class Traced(NamedTuple):
    """A function as a program: inspected once, and run without tracing it again."""

    program: ClosedJaxpr
    result: Any

    @property
    def types(self) -> Any:
        """The result with the types of arrays, how they are divided included."""
        return jax.tree.unflatten(
            jax.tree.structure(self.result), self.program.out_avals
        )

    def __call__(self, *operands: Any) -> Any:
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def trace(function: Callable[..., Any], *operands: Any) -> Traced:
    """The program of a function; one that is traced already as it is."""
    if isinstance(function, Traced):
        return function
    return Traced(*jax.make_jaxpr(function, return_shape=True)(*operands))


def axes_of_results(branches: Sequence[Traced]) -> list[frozenset[str]]:
    """For every result the axes over which that of any branch differs.

    Args:
      branches: of a sync step, and of a local step.
    """
    synced, *others = branches
    for local in others:
        _require_same_result(synced.result, local.result)
    avals = zip(*(traced.program.out_avals for traced in branches), strict=True)
    return [
        frozenset().union(*map(_collectives.varying_aval, results)) for results in avals
    ]


def _require_same_result(synced: Any, local: Any) -> None:
    if jax.tree.structure(synced) != jax.tree.structure(local):
        raise ValueError(
            "A sync step and a local step return different trees:\n"
            f"{jax.tree.structure(synced)}\n{jax.tree.structure(local)}"
        )
    pairs = zip(jax.tree.leaves_with_path(synced), jax.tree.leaves(local), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"A sync step returns {a.dtype}{list(a.shape)} and a local step "
                f"{b.dtype}{list(b.shape)} for{jax.tree_util.keystr(path) or ' it'}. "
                "Keep the shapes and dtypes of state and updates in the optimizer."
            )


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs in an equation: branches, bodies, jitted functions."""
    return list(jaxprs_in_params(equation.params))


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


def is_update(equation: JaxprEqn, scope: str) -> bool:
    """Whether this is the update of an optimizer, in the scope of this name."""
    is_mapped = equation.primitive.name == "custom_vmap_call"
    return is_mapped and scope in str(equation.source_info.name_stack)


def updates_in(jaxpr: Jaxpr, scope: str) -> int:
    """How many updates of optimizers that synchronise a step's program makes.

    Args:
      jaxpr: the program.
      scope: name of the scope around an update.

    Raises:
      ValueError: if one stands in a condition or a while loop.
    """
    found = 0
    for equation in jaxpr.eqns:
        if is_update(equation, scope):
            found += 1
            continue
        inside = sum(updates_in(each, scope) for each in inner_jaxprs(equation))
        if inside and equation.primitive.name in ("cond", "while"):
            raise ValueError(
                "The optimizer's update is inside a lax.cond or while_loop, of which "
                "replicas.step would run every branch on every step. Put what decides "
                "around the inner optimizer, adaptive_sync(optax.apply_if_finite(...))."
            )
        found += inside * equation.params.get("length", 1)
    return found


def bytes_given(equation: JaxprEqn) -> int:
    """Bytes of the arrays that an equation is given."""
    avals: list[Any] = [x.aval for x in equation.invars]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
