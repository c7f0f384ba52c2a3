"""What moves the axes of a value: transpositions, reshapes, slices, concatenations."""

import dataclasses
import math
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import BESIDE, Atom
from curvadion_jax.dimension_numbers._reader import (
    Reader,
    Values,
    activation,
    handles,
    look_up,
    unknown,
)
from curvadion_jax.dimension_numbers._values import (
    NONE,
    Mixed,
    Output,
    Value,
    Weight,
    is_data,
    is_given,
    is_weight,
)


@handles("transpose")
def _transpose(reader, equation, values, needed):
    order = equation.params["permutation"]
    return [values[0].moved(lambda dims: tuple(dims[d] for d in order))]


@handles("reshape", "squeeze", "expand_dims")
def _reshape(reader, equation, values, needed):
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    move = lambda dims: _axes.reshaped(dims, old, new)
    for x in values[0].outputs:
        dims = move(x.dims)
        for d in range(len(new)):
            if len(merged := _axes.axes_at(dims, [d])) > 1:
                reader.tell(x, merged, "joined")
        # A shift of every row against the others, as of relative positions.
        reader.tell(x, _axes.torn(x.dims, dims), "selected")
    return [values[0].moved(move)]


@handles("broadcast_in_dim")
def _broadcast_in_dim(reader, equation, values, needed):
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    places = equation.params["broadcast_dimensions"]
    value = values[0].moved(lambda dims: _axes.broadcast(dims, old, new, places))
    if math.prod(old) < math.prod(new):  # a mask, and not one-hot vectors
        value = dataclasses.replace(value, is_indicator=False)
    return [value]


@handles("tile")
def _tile(reader, equation, values, needed):
    reps, old = equation.params["reps"], equation.invars[0].aval.shape

    def move(dims):
        places = zip(dims, reps, old, strict=True)
        return tuple(_axes.repeated(r) + dim if n else dim for dim, r, n in places)

    return [values[0].moved(move)]


@handles("all_gather")
def _all_gather(reader, equation, values, needed):
    if not equation.params["tiled"]:
        return unknown(reader, equation, values, needed)
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return [values[0].moved(lambda dims: _axes.resized(dims, *shapes))]


@handles("slice")
def _slice(reader, equation, values, needed):
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return [cut(reader, equation, values[0], *shapes)]


@handles("dynamic_slice")
def _dynamic_slice(reader, equation, values, needed):
    value, *places = values
    if value is None:  # constants, at a place that data say
        return unknown(reader, equation, values, needed)
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    picked = [d for d, n in enumerate(new) if n == 1 < old[d]]
    reader.select(value, [d for d in picked if places[d] and is_given(places[d])])
    if not (is_weight(value) and any(map(is_data, places))):
        return _slice(reader, equation, values, needed)
    move = lambda dims: _axes.resized(dims, old, new)
    return [look_up(reader, equation, value, move, picked, by_data=True)]


@handles("split")
def _split(reader, equation, values, needed):
    old = equation.invars[0].aval.shape
    shapes = [variable.aval.shape for variable in equation.outvars]
    return [cut(reader, equation, values[0], old, new) for new in shapes]


@handles("unstack")
def _unstack(reader, equation, values, needed):
    old, axis = equation.invars[0].aval.shape, equation.params["axis"]
    part = cut(reader, equation, values[0], old, (*old[:axis], 1, *old[axis + 1 :]))
    part = part.moved(lambda dims: (*dims[:axis], *dims[axis + 1 :]))
    return [part] * len(equation.outvars)


def cut(reader: Reader, equation: Any, value: Value, old: Any, new: Any) -> Value:
    """A part of a value. An axis of which one place is left is one of a stack."""
    picked = [d for d, n in enumerate(new) if n == 1 < old[d]]
    tracked = []
    for x in value.tracked:
        gone = x.at(picked)
        if isinstance(x, Weight):
            x = dataclasses.replace(x, stack=x.stack | gone)
        elif isinstance(x, Output):
            reader.tell(x, gone, "separate")
            whole = gone - x.at(d for d in range(len(new)) if d not in picked)
            x = dataclasses.replace(x, taken=x.taken | whole)
        elif isinstance(x, Mixed) and x.is_factor and gone:
            reader.ask(equation, x, "times an activation, and one place of it")
        tracked.append(x.moved(lambda dims: _axes.resized(dims, old, new)))
    return dataclasses.replace(value, tracked=tuple(tracked))


@handles("pad")
def _pad(reader, equation, values, needed):
    if values[0] is None or is_data(values[1]):
        return unknown(reader, equation, values, needed)
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return [values[0].moved(lambda dims: _axes.resized(dims, old, new))]


@handles("concatenate")
def _concatenate(reader, equation, values, needed):
    return [_beside(reader, equation, values, equation.params["dimension"])]


@handles("stack")
def _stack(reader, equation, values, needed):
    axis = equation.params["axis"]
    put = lambda dims: (*dims[:axis], (), *dims[axis:])
    return [_beside(reader, equation, [x and x.moved(put) for x in values], axis)]


def _beside(reader: Reader, equation: Any, values: Values, axis: int) -> Value:
    """Values side by side along an axis."""

    def join(dims):
        beside = _axes.cut(dims[axis]) or (Atom(BESIDE, None),)
        return (*dims[:axis], beside, *dims[axis + 1 :])

    moved = [value and value.moved(join) for value in values]
    weights = [x for value in moved if is_weight(value) for x in value.weights]
    if not any(map(is_data, values)):
        return Value("weight", _values.merged(weights))
    for x in weights:
        reader.meet(equation, x, "put beside activations")
    kept = [x for value in moved if is_data(value) for x in value.tracked]
    kept = [  # beside others it is not one place any more
        dataclasses.replace(x, taken=NONE) if isinstance(x, Output) else x for x in kept
    ]
    return activation(moved, kept)


@handles("dynamic_update_slice")
def _dynamic_update_slice(reader, equation, values, needed):
    into, update = values[:2]
    if any(map(is_weight, (into, update))) or not (into or update):
        return unknown(reader, equation, values, needed)
    return [activation([into, update])]
