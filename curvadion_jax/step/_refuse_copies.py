"""Refuses an inner optimizer that keeps a copy of the parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import Literal

from curvadion_jax import _finite

# What moves, casts, selects or arranges numbers and makes no new ones.
_HANDS_ON = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "device_put",
    "optimization_barrier",
    "pad",
    "reduce_precision",
    "reshape",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stack",
    "transpose",
}


def refuse_copies(inner: optax.GradientTransformation, params: Any) -> None:
    """Rejects an inner optimizer whose state follows the parameters.

    A sync would move the parameters and not the copy, and the next step would take the
    replicas apart again. The program of `inner.init` tells, whatever the values are. A
    copy that `inner.update` never changes is where the run began, as in `prodigy`, and
    may stay.
    """
    program, state = jax.make_jaxpr(inner.init, return_shape=True)(params)
    copies = _handed_on(program.jaxpr, [True] * len(program.jaxpr.invars))
    if not any(copies):
        return
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    # (Under a jit of its own, an update is not seen to leave a state as it is.)
    step = jax.make_jaxpr(inner.update)(params, state, params).jaxpr
    first = len(jax.tree.leaves(params))
    given = step.invars[first : first + len(paths)]
    returned = step.outvars[first:]
    for path, is_copy, old, new in zip(paths, copies, given, returned, strict=True):
        if is_copy and old is not new:
            raise ValueError(
                f"The inner optimizer's state{jax.tree_util.keystr(path)} is a copy of "
                "a parameter. A sync would move the parameters and leave the copy "
                "behind. Keep parameters in float32 and cast them in the loss, or keep "
                "master weights around the optimizer. What needs its copy inside, such "
                "as schedule_free, cannot have replicas that take local steps."
            )


def _handed_on(program: Any, known: Sequence[bool]) -> list[bool]:
    """Which results of a program are arguments that are known, or their parts."""
    found = {x for x, is_known in zip(program.invars, known, strict=True) if is_known}
    is_found = lambda x: not isinstance(x, Literal) and x in found
    for equation in program.eqns:
        given = [is_found(x) for x in equation.invars]
        if "jaxpr" in equation.params:  # a function under jit
            inner = equation.params["jaxpr"]
            made = _handed_on(getattr(inner, "jaxpr", inner), given)
        elif equation.primitive.name not in _HANDS_ON:
            continue
        else:
            results = len(equation.outvars)
            made = given if len(given) == results else [any(given)] * results
        for x, is_made in zip(equation.outvars, made, strict=True):
            if is_made and _finite.is_float(x.aval):  # a mask of booleans is no copy
                found.add(x)
    return [is_found(x) for x in program.outvars]
