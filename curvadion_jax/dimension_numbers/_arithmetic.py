"""Arithmetic: element by element, and sums over axes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, Atom, Dims
from curvadion_jax.dimension_numbers._reader import Reader
from curvadion_jax.dimension_numbers._values import (
    Mixed,
    Tracked,
    Value,
    Values,
    Weight,
    activation,
    is_data,
    is_given,
    is_weight,
)

# Through these a sum of terms stays one, and through the others a product does too.
_SUMS = set(
    """add add_any convert_element_type copy copy_p neg real
reduce_precision rev select_n sub""".split()
)
_LINEAR = _SUMS | {"mul", "div"}
# Through these, too, one-hot vectors stay such, or become several of them.
_OF_INDICATORS = _LINEAR | set(
    "abs and clamp integer_pow max min ne not or round sign square xor".split()
)

Shapes = Sequence[tuple[int, ...]]
"""Of the operands."""


def identity(reader, equation, operands, needed):
    """Returns the operands, as a sharding constraint does."""
    return operands


def stop_gradient(reader, equation, operands, needed):
    """Makes data of an activation, and a constant of a parameter: none is trained."""
    (value,) = operands
    stopped = Value("data", is_indicator=value.is_indicator)
    return [stopped if is_data(value) else None]


def elementwise(reader, equation, operands, needed):
    """Combines operands of one shape, or numbers with an array, by elements."""
    shapes = [reader.shape_of(atom) for atom in equation.invars]
    new = equation.outvars[0].aval.shape
    values = [
        value and value.moved(lambda dims, old=old: _over(dims, old, new))
        for value, old in zip(operands, shapes, strict=True)
    ]
    name = equation.primitive.name
    if name == "mul":
        reader.follow_rows(values)
    if name == "select_n" and is_given(values[0]):
        _select(reader, values[1:])
    has_weights = any(map(is_weight, values))
    if not has_weights or _mixes(equation, values, shapes):
        result = _combined(reader, equation, values, shapes)
        is_indicator = _is_indicator(equation, values, shapes)
        return [dataclasses.replace(result, is_indicator=is_indicator)]
    parts = _parts(reader, equation, values)
    if jnp.iscomplexobj(equation.outvars[0].aval):
        parts = [x.lose("complex arithmetic") for x in parts]
    return [Value("weight", tuple(parts)).moved(_masked(values, shapes))]


def _over(dims: Dims, old: Sequence[int], new: Sequence[int]) -> Dims:
    """Dims of an operand in the result's shape: a number is repeated everywhere."""
    places = range(len(old)) if len(old) == len(new) else ()
    return _axes.broadcast(dims, old, new, places)


def _mixes(equation: Any, values: Values, shapes: Shapes) -> bool:
    """Whether data are mixed into parameters, other than as a mask or a number.

    An activation is no mask. Inputs of the loss are none if they vary along an axis
    along which no parameter does, such as a batch.
    """
    shape, weights = equation.outvars[0].aval.shape, _values.weights_of(values)
    covered = set().union(*(x.covered for x in weights))
    for value, own in zip(values, shapes, strict=True):
        if not is_data(value) or math.prod(own) == 1 < math.prod(shape):
            continue
        if value.kind == "activation" or any(x.is_lost for x in weights):
            return True
        if any(n > 1 and d not in covered for d, n in enumerate(own)):
            return True
    return False


def _combined(reader: Reader, equation: Any, values: Values, shapes: Shapes) -> Value:
    """Data combined with each other, or with parameters."""
    name = equation.primitive.name
    tracked = _still_tracked(name, values)
    for value, own in zip(values, shapes, strict=True):
        for x in value.weights if value else ():
            reader.meet(equation, x, f"{name} with data", math.prod(own) == 1)
            if name in _LINEAR and len(x.all_axes) > 1:
                tracked.append(Mixed(x.dims, x.parameter, name == "mul"))
            if name == "mul" and x.stack and len(x.all_axes) > 1:
                # Looked up in a table of matrices: a product with them, by hand.
                reader.may_follow(_values.open_of(values))
    return activation(values, tracked)


def _still_tracked(name: str, values: Values) -> list[Tracked]:
    """What is tracked in data, and still is in the result.

    A factor stays a factor under products and sums, a term under sums alone.
    """
    return [
        x
        for value in values
        if is_data(value)
        for x in value.tracked
        if not isinstance(x, Mixed) or name in (_LINEAR if x.is_factor else _SUMS)
    ]


def _parts(reader: Reader, equation: Any, values: Values) -> list[Weight]:
    """The parameters of a weight, less those that only scale or shift another one."""
    parts = _values.merged(_values.weights_of(values))
    long = {d for d, n in enumerate(equation.outvars[0].aval.shape) if n > 1}
    whole = {x.parameter for x in parts if not x.is_lost and x.covered >= long}
    kept = []
    for x in parts:
        if not whole or x.parameter in whole or x.is_lost:
            kept.append(x)
        else:
            why = "scales or shifts another parameter"
            reader.record(equation, x.parameter, "elementwise", why, stack=x.stack)
    return kept


def _masked(values: Values, shapes: Shapes) -> Callable[[Dims], Dims]:
    """How axes lie behind a mask: along its axes nothing is repeated any more.

    As in ``jnp.diag(scale)``, which repeats a vector and masks all but the diagonal.
    """
    masks = [
        own for value, own in zip(values, shapes, strict=True) if not is_weight(value)
    ]
    varied = {d for own in masks for d, n in enumerate(own) if n > 1}

    def move(dims):
        return tuple(
            (Atom(BESIDE, None),) if d in varied and _axes.is_repeated(dim) else dim
            for d, dim in enumerate(dims)
        )

    return move


def _is_indicator(equation: Any, values: Values, shapes: Shapes) -> bool | None:
    """Whether the result tells which numbers are equal; None if it may."""
    name = equation.primitive.name
    if name == "eq":
        return True
    if name == "convert_element_type":
        return values[0].is_indicator if values[0] else False
    if name not in _OF_INDICATORS:
        return False
    # One-hot vectors that are masked or smoothed still look rows up. But what is
    # repeated to this shape is a mask itself, and so is what chooses among cases,
    # unless these are constants, as in jnp.where(ids == places, 1, 0).
    size = math.prod(equation.outvars[0].aval.shape)
    pairs = list(zip(values, shapes, strict=True))
    if name == "select_n" and any(values[1:]):
        pairs = pairs[1:]
    whole = [value for value, own in pairs if value and math.prod(own) == size]
    return None if any(x.is_indicator is not False for x in whole) else False


def _select(reader: Reader, cases: Values) -> None:
    """Notes that a condition chooses among places of a product's output axis."""
    first, *others = [value.outputs if value else () for value in cases]
    for x in first:
        for y in (y for outputs in others for y in outputs):
            if x.use == y.use:
                reader.tell(x, x.taken & y.taken, "selected")


def reduce(reader, equation, operands, needed):
    """Sums over axes, or takes their largest, smallest or product."""
    name, value = equation.primitive.name, operands[0]
    summed, is_sum = equation.params["axes"], name == "reduce_sum"
    rest = [d for d in range(len(equation.invars[0].aval.shape)) if d not in summed]
    keep = lambda dims: tuple(dims[d] for d in rest)
    tracked = []
    for x in value.tracked:
        gone, left = x.at(summed), x.at(rest)
        if isinstance(x, Weight) and gone:
            x = x.lose(name)
        elif isinstance(x, Mixed) and x.is_factor and gone and left and is_sum:
            reader.ask(equation, x, "times an activation, and a sum")
        tracked.append(x.moved(keep))
    tracked = [x for x in tracked if isinstance(x, Weight) or x.all_axes]
    result = Value(value.kind, _values.unique(tracked), value.open)
    if name == "reduce_prod":
        return [result]
    # A sum of one-hot vectors looks several rows up, as a bag of words does.
    return [_values.with_indicators(result, operands)]
