"""Look-ups: parts of arrays at places that data, or constants, give."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from curvadion_jax.dimension_numbers import _axes, _moves
from curvadion_jax.dimension_numbers._axes import Dims
from curvadion_jax.dimension_numbers._reader import Reader, unknown
from curvadion_jax.dimension_numbers._values import Value, is_data, is_given, is_weight


def gather(reader, equation, operands, needed):
    """Takes parts of a parameter, or of the outputs of a layer."""
    value, places = operands
    if value is None or is_weight(places):
        return unknown(reader, equation, operands, needed)
    numbers = equation.params["dimension_numbers"]
    sizes = equation.params["slice_sizes"]
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    rest = [d for d in range(len(old)) if d not in gone]
    to = dict(zip(rest, sorted(numbers.offset_dims), strict=True))

    def move(dims):
        dims = _axes.resized(dims, old, sizes)
        result = [_axes.repeated(n) for n in new]
        for d, place in to.items():
            result[place] = dims[d]
        return tuple(result)

    if is_weight(value):
        picked = [d for d, n in enumerate(old) if sizes[d] == 1 < n]
        return [_look_up(reader, equation, value, move, picked, is_data(places))]
    if places is None and math.prod(equation.invars[1].aval.shape[:-1]) == 1:
        # At one constant place it is a slice.
        return [_moves.cut(reader, equation, value, old, sizes).moved(move)]
    if is_given(places):
        chosen = [d for d in numbers.start_index_map if sizes[d] < old[d]]
        reader.select(value, chosen)
    return unknown(reader, equation, operands, needed)


def dynamic_slice(reader, equation, operands, needed):
    """Takes one part: a slice, or a look-up if data say where."""
    value, *places = operands
    if value is None:  # a part of a constant
        return unknown(reader, equation, operands, needed)
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    picked = [d for d, n in enumerate(new) if n == 1 < old[d]]
    reader.select(value, [d for d in picked if places[d] and is_given(places[d])])
    if not (is_weight(value) and any(map(is_data, places))):
        return _moves.slice_(reader, equation, operands, needed)
    move = lambda dims: _axes.resized(dims, old, new)
    return [_look_up(reader, equation, value, move, picked, by_data=True)]


def _look_up(
    reader: Reader,
    equation: Any,
    value: Value,
    move: Callable[[Dims], Dims],
    picked: Sequence[int],
    by_data: bool,
) -> Value:
    """What is taken of parameters.

    Args:
      reader: to note the uses.
      equation: of the look-up.
      value: a weight.
      move: from the axes of the value to those of the result.
      picked: the axes of the value of which single places are taken.
      by_data: whether data say which places.

    Returns:
      Rows, which are an activation; or a weight if what is taken are matrices.
    """
    if lost := [x for x in value.weights if x.is_lost]:
        for x in lost:
            reader.ask(equation, x, f"a look-up after {x.lost}")
        return Value("activation")
    found = [x.picked(picked).moved(move) for x in value.weights]
    if not picked or any(len(x.all_axes) > 1 for x in found):
        return Value("weight", tuple(found))
    kind, why = "lookup" if by_data else "constant lookup", "rows are looked up"
    uses = [reader.record(equation, x.parameter, kind, why) for x in found]
    if not any(x.all_axes for x in found):
        return Value("activation")  # Numbers scale a layer, and are no layer after it.
    return Value("activation", open=frozenset(use for use in uses if use))
