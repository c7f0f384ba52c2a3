"""Arithmetic: element by element, and sums over axes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, Atom, Dims
from curvadion_jax.dimension_numbers._reader import (
    Reader,
    Values,
    activation,
    handles,
)
from curvadion_jax.dimension_numbers._values import (
    Mixed,
    Output,
    Value,
    Weight,
    is_data,
    is_given,
    is_weight,
)

_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil
clamp complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic
lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt
select_n sign sin sinh sqrt square sub tan tanh xor rev name shift_left
shift_right_arithmetic shift_right_logical""".split()
_IDENTITIES = """device_put layout_constraint mesh_cast optimization_barrier pcast pmax
pmin psum psum_invariant pvary reshard sharding_constraint""".split()
_SUMS = set("add add_any convert_element_type copy neg select_n sub".split())
_LINEAR = _SUMS | {"mul", "div"}


@handles(*_IDENTITIES)
def _identity(reader, equation, values, needed):
    return values


@handles("stop_gradient")
def _stop_gradient(reader, equation, values, needed):
    """No gradient passes: what comes behind does not train what comes before."""
    (value,) = values
    kept = Value("data", is_indicator=value.is_indicator)
    return [kept if is_data(value) else None]


@handles(*_ELEMENTWISE)
def _elementwise(reader, equation, values, needed):
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    shapes = [reader.shape_of(atom) for atom in equation.invars]
    operands = [
        value and value.moved(lambda dims, s=s: _over(dims, s, shape))
        for value, s in zip(values, shapes, strict=True)
    ]
    # A factor stays one under products and sums, a term under sums alone.
    tracked = [
        x
        for value in operands
        if is_data(value)
        for x in value.tracked
        if not isinstance(x, Mixed) or name in (_LINEAR if x.is_factor else _SUMS)
    ]
    if name == "mul":
        reader.follow_rows(operands)
    if name == "select_n" and is_given(values[0]):
        _select(reader, operands[1:])
    if not any(map(is_weight, operands)):
        result = activation(operands, tracked)
        is_indicator = _is_indicator(name, values, shapes, shape)
        return [dataclasses.replace(result, is_indicator=is_indicator)]
    if not _mixes(operands, shapes, shape):
        parts = _parts(reader, equation, operands, shape)
        if jnp.iscomplexobj(equation.outvars[0].aval):
            parts = tuple(x.lose("complex arithmetic") for x in parts)
        return [Value("weight", parts).moved(_masked(operands, shapes))]
    for value, s in zip(operands, shapes, strict=True):
        for x in value.weights if value else ():
            reader.meet(equation, x, f"{name} with data", math.prod(s) == 1)
            if name in _LINEAR and len(x.all_axes) > 1:
                tracked.append(Mixed(x.dims, x.parameter, name == "mul"))
    return [activation(operands, tracked)]


def _select(reader: Reader, cases: Values) -> None:
    """Notes that a condition selects among places of an output axis."""
    every = [value.outputs if value else () for value in cases]
    for x in every[0]:
        for other in (y for outputs in every[1:] for y in outputs):
            if x.use == other.use:
                reader.tell(x, x.taken & other.taken, "selected")


def _is_indicator(
    name: str, values: Values, shapes: Sequence[Any], shape: Any
) -> bool | None:
    """Whether the result tells which numbers are equal; None if it may."""
    if name == "eq":
        return True
    if name == "convert_element_type":
        return values[0].is_indicator if values[0] else False
    if name not in _LINEAR:
        return False
    # One-hot vectors that are masked or smoothed still look rows up. What is repeated
    # is a mask itself, and so is what chooses among cases.
    operands = list(zip(values, shapes, strict=True))[name == "select_n" :]
    are_whole = [x for x, s in operands if x and math.prod(s) == math.prod(shape)]
    return None if any(x.is_indicator is not False for x in are_whole) else False


def _over(dims, old, new):
    """Dims of an operand over the result's shape: a number is repeated everywhere."""
    places = range(len(old)) if len(old) == len(new) else ()
    return _axes.broadcast(dims, old, new, places)


def _mixes(operands: Values, shapes: Sequence[Any], shape: Any) -> bool:
    """Whether data are mixed into parameters, other than as a mask or a number.

    An activation is no mask. Inputs of the loss are data if they vary along an axis
    along which no parameter does, such as a batch.
    """
    weights = [x for value in operands if is_weight(value) for x in value.weights]
    covered = set().union(*(x.covered for x in weights))
    for value, s in zip(operands, shapes, strict=True):
        if not is_data(value) or math.prod(s) == 1 < math.prod(shape):
            continue
        if value.kind == "activation" or any(x.is_lost for x in weights):
            return True
        if any(n > 1 and d not in covered for d, n in enumerate(s)):
            return True
    return False


def _masked(operands: Values, shapes: Sequence[Any]) -> Callable[[Dims], Dims]:
    """How axes lie behind a mask: along an axis of the mask nothing is repeated."""
    masks = zip(operands, shapes, strict=True)
    varied = {d for x, s in masks if not is_weight(x) for d, n in enumerate(s) if n > 1}

    def move(dims):
        return tuple(
            (Atom(BESIDE, None),) if d in varied and _axes.is_repeated(dim) else dim
            for d, dim in enumerate(dims)
        )

    return move


def _parts(reader: Reader, equation: Any, operands: Values, shape: Any):
    """The parameters of a value, less those that only scale or shift another one."""
    parts = _values.merged(x for value in operands if value for x in value.weights)
    long = {d for d, n in enumerate(shape) if n > 1}
    whole = {x.parameter for x in parts if not x.is_lost and x.covered >= long}
    kept = []
    for x in parts:
        if not whole or x.parameter in whole or x.is_lost:
            kept.append(x)
        else:
            why = "scales or shifts another parameter"
            reader.record(equation, x.parameter, "elementwise", why, stack=x.stack)
    return tuple(kept)


@handles(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"
)
def _reduce(reader, equation, values, needed):
    name, value = equation.primitive.name, values[0]
    summed, is_sum = equation.params["axes"], name == "reduce_sum"
    rest = [d for d in range(len(equation.invars[0].aval.shape)) if d not in summed]
    keep = lambda dims: tuple(dims[d] for d in rest)
    tracked = []
    for x in value.tracked:
        gone, left = x.at(summed), x.at(rest)
        if isinstance(x, Weight) and gone:
            x = x.lose(name)
        elif isinstance(x, Output) and len(gone) == 1 and left and is_sum:
            reader.tell(x, gone, "separate")  # a sum over experts
        elif isinstance(x, Mixed) and x.is_factor and gone and left and is_sum:
            reader.ask(equation, x, "times an activation, and a sum")
        tracked.append(x.moved(keep))
    tracked = [x for x in tracked if isinstance(x, Weight) or x.all_axes]
    return [Value(value.kind, _values.unique(tracked), value.open)]
