"""What moves the axes of a value: transpositions, reshapes, slices, concatenations."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, NONE, Atom
from curvadion_jax.dimension_numbers._reader import Reader, unknown
from curvadion_jax.dimension_numbers._values import (
    Mixed,
    Output,
    Value,
    Values,
    Weight,
    activation,
    is_data,
    is_weight,
)


def transpose(reader, equation, operands, needed):
    order = equation.params["permutation"]
    return [operands[0].moved(lambda dims: tuple(dims[d] for d in order))]


def reshape(reader, equation, operands, needed):
    """Reshapes, and before that transposes if the equation says so."""
    value, (old, new) = operands[0], _shapes(equation)
    if order := equation.params.get("dimensions"):
        value = value.moved(lambda dims: tuple(dims[d] for d in order))
        old = [old[d] for d in order]
    return [_reshaped(reader, value, old, new)]


def squeeze(reader, equation, operands, needed):
    """Removes or adds axes of length 1."""
    return [_reshaped(reader, operands[0], *_shapes(equation))]


def _reshaped(
    reader: Reader, value: Value, old: Sequence[int], new: Sequence[int]
) -> Value:
    """A reshape; output axes of a product that it merges are one side of a matrix."""
    move = lambda dims: _axes.reshaped(dims, old, new)
    for x in value.outputs:
        dims = move(x.dims)
        for d in range(len(new)):
            if len(merged := _axes.axes_at(dims, [d])) > 1:
                reader.tell(x, merged, "joined")
        # A shift of every row against the others, as of relative positions.
        reader.tell(x, _axes.torn(x.dims, dims), "selected")
    return value.moved(move)


def broadcast_in_dim(reader, equation, operands, needed):
    old, new = _shapes(equation)
    places = equation.params["broadcast_dimensions"]
    value = operands[0].moved(lambda dims: _axes.broadcast(dims, old, new, places))
    if math.prod(old) < math.prod(new):  # a mask, and not one-hot vectors
        value = dataclasses.replace(value, is_indicator=False)
    return [value]


def tile(reader, equation, operands, needed):
    reps, (old, _) = equation.params["reps"], _shapes(equation)

    def move(dims):
        places = zip(dims, reps, old, strict=True)
        return tuple(_axes.repeated(r) + dim if n else dim for dim, r, n in places)

    return [operands[0].moved(move)]


def gathered_parts(reader, equation, operands, needed):
    """Gathers the parts of sharded axes, inside of a `shard_map`."""
    if not equation.params["tiled"]:
        return unknown(reader, equation, operands, needed)
    shapes = _shapes(equation)
    return [operands[0].moved(lambda dims: _axes.resized(dims, *shapes))]


def slice_(reader, equation, operands, needed):
    return [cut(reader, equation, operands[0], *_shapes(equation))]


def split(reader, equation, operands, needed):
    old, _ = _shapes(equation)
    shapes = [variable.aval.shape for variable in equation.outvars]
    return [cut(reader, equation, operands[0], old, new) for new in shapes]


def unstack(reader, equation, operands, needed):
    (old, _), axis = _shapes(equation), equation.params["axis"]
    part = cut(reader, equation, operands[0], old, (*old[:axis], 1, *old[axis + 1 :]))
    part = part.moved(lambda dims: (*dims[:axis], *dims[axis + 1 :]))
    return [part] * len(equation.outvars)


def cut(
    reader: Reader,
    equation: Any,
    value: Value,
    old: Sequence[int],
    new: Sequence[int],
) -> Value:
    """A part of a value. An axis of which one place is left counts matrices."""
    picked = [d for d, n in enumerate(new) if n == 1 < old[d]]
    tracked = []
    for x in value.tracked:
        gone = x.at(picked)
        if isinstance(x, Weight):
            x = x.picked(picked)
        elif isinstance(x, Output):
            reader.tell(x, gone, "separate")
            whole = gone - x.at(d for d in range(len(new)) if d not in picked)
            x = dataclasses.replace(x, taken=x.taken | whole)
        elif isinstance(x, Mixed) and x.is_factor and gone:
            reader.ask(equation, x, "times an activation, and one place of it")
        tracked.append(x.moved(lambda dims: _axes.resized(dims, old, new)))
    return dataclasses.replace(value, tracked=tuple(tracked))


def pad(reader, equation, operands, needed):
    value, padding = operands
    if value is None or is_data(padding):
        return unknown(reader, equation, operands, needed)
    old, new = _shapes(equation)

    # In the padding a parameter is not repeated.
    beside = (Atom(BESIDE, None),) if is_weight(value) else None

    def pad_one(dim, before, after):
        is_beside = before != after and _axes.is_repeated(dim)
        return beside if beside and is_beside else dim

    def move(dims):
        resized = _axes.resized(dims, old, new)
        return tuple(map(pad_one, resized, old, new))

    return [value.moved(move)]


def concatenate(reader, equation, operands, needed):
    return [_beside(reader, equation, operands, equation.params["dimension"])]


def stack(reader, equation, operands, needed):
    axis = equation.params["axis"]
    put = lambda dims: (*dims[:axis], (), *dims[axis:])
    return [_beside(reader, equation, [x and x.moved(put) for x in operands], axis)]


def _beside(reader: Reader, equation: Any, operands: Values, axis: int) -> Value:
    """Values side by side along an axis."""

    def join(dims):
        beside = _axes.cut(dims[axis]) or (Atom(BESIDE, None),)
        return (*dims[:axis], beside, *dims[axis + 1 :])

    moved = [value and value.moved(join) for value in operands]
    weights = _values.weights_of(moved)
    if not any(map(is_data, operands)):
        return Value("weight", _values.merged(weights))
    for x in weights:
        reader.meet(equation, x, "put beside activations")
    kept = [x for value in moved if is_data(value) for x in value.tracked]
    kept = [  # beside others it is not one place any more
        dataclasses.replace(x, taken=NONE) if isinstance(x, Output) else x for x in kept
    ]
    return _values.with_indicators(activation(moved, kept), operands)


def dynamic_update_slice(reader, equation, operands, needed):
    """Writes a part; of parameters it is not known which part is left."""
    into, update = operands[:2]
    if any(map(is_weight, (into, update))) or not (into or update):
        return unknown(reader, equation, operands, needed)
    return [_values.with_indicators(activation([into, update]), [into, update])]


def _shapes(equation: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the first operand and of the first result."""
    return equation.invars[0].aval.shape, equation.outvars[0].aval.shape
