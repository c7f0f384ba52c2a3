"""Products, convolutions and look-ups: where parameters meet data."""

import dataclasses
import math
from collections.abc import Callable

from curvadion_jax.dimension_numbers import _axes, _values
from curvadion_jax.dimension_numbers._axes import Dim
from curvadion_jax.dimension_numbers._moves import cut
from curvadion_jax.dimension_numbers._reader import (
    CONSTANT,
    Reader,
    activation,
    handles,
    look_up,
    unknown,
)
from curvadion_jax.dimension_numbers._values import (
    Mixed,
    Output,
    Tracked,
    Value,
    is_data,
    is_given,
    is_weight,
)

_NUMBERS, _DATA = Value("constant"), Value("data")


@handles("dot_general")
def _dot_general(reader, equation, values, needed):
    summed, batch = equation.params["dimension_numbers"]
    return [_product(reader, equation, values, summed, batch)]


@handles("ragged_dot_general", "ragged_dot")
def _ragged_dot(reader, equation, values, needed):
    numbers = equation.params["ragged_dot_dimension_numbers"]
    summed, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if len(numbers.lhs_ragged_dimensions) != 1 or not groups:
        return unknown(reader, equation, values, needed)
    return [_product(reader, equation, values[:2], summed, batch, groups)]


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of a product: its value, its shape, and what happens to its axes."""

    value: Value
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    batch: tuple[int, ...]
    kept: tuple[int, ...]
    groups: tuple[int, ...]
    is_left: bool

    def moved(self, other: "_Side") -> Callable:
        """How the product's axes lie: a batch, the left side's, the right side's."""

        def move(dims):
            beside = [_axes.repeated(other.shape[d]) for d in other.kept]
            own = [dims[d] for d in self.kept]
            return (
                *(dims[d] for d in self.batch),
                *(own + beside if self.is_left else beside + own),
            )

        return move


def _product(reader, equation, values, summed, batch, groups=()) -> Value:
    sides = []
    for i, value in enumerate(values):
        shape = equation.invars[i].aval.shape
        grouped = groups if i else ()
        gone = {*summed[i], *batch[i], *grouped}
        kept = tuple(d for d in range(len(shape)) if d not in gone)
        numbers = tuple(summed[i]), tuple(batch[i]), kept, grouped
        sides.append(_Side(value or _NUMBERS, shape, *numbers, is_left=not i))
    if all(map(is_weight, values)):
        _learned_input(reader, equation, sides)
    left, right = sides
    matrix = next((side for side in sides if is_weight(side.value)), None)
    if matrix is None:
        return _product_of_data(reader, equation, left, right)
    data = right if matrix is left else left
    if not is_data(data.value):
        # Of two parameters neither is known to be the input, nor of a constant.
        weights = [x for side in sides for x in side.value.weights]
        why = "a product of two parameters" if is_weight(data.value) else CONSTANT
        return Value("weight", _values.unique(x.lose(why) for x in weights))
    return _product_with_data(reader, equation, matrix, data)


def _product_with_data(reader, equation, matrix: _Side, data: _Side) -> Value:
    """A layer: parameters times data."""
    reader.follow(data.value.open)
    _tell_apart(reader, data, matrix)
    vectors = math.prod(data.shape[d] for d in (*data.kept, *data.batch))
    uses, outputs = set(), []
    for x in matrix.value.weights:
        if x.is_lost:
            reader.ask(equation, x, f"a product after {x.lost}")
            continue
        stack = x.stack | x.at(matrix.batch) | x.at(matrix.groups)
        sides = x.at(matrix.summed), x.at(matrix.kept), stack
        kind, why = "product", "a product"
        if data.value.is_indicator:
            kind, why = "lookup", "a product with one-hot vectors"
        elif data.value.is_indicator is None:
            kind, why = "unknown", "a product with what may be one-hot vectors"
        elif data.value.kind == "data":
            why = "a product with raw inputs"
        use = reader.record(
            equation, x.parameter, kind, why, *sides, vectors, bool(x.stack) or x.is_cut
        )
        if use:
            uses.add(use)
            outputs.append(Output(matrix.moved(data)(x.dims), x.parameter, use))
    if not uses:
        uses = data.value.open  # of a backward pass
    return Value("activation", _values.unique(outputs), frozenset(uses))


def _product_of_data(reader, equation, left: _Side, right: _Side) -> Value:
    """Such as of queries and keys."""
    values, tracked = [left.value, right.value], []
    reader.follow_rows(values)
    for side, other in ((left, right), (right, left)):
        _tell_apart(reader, side, other)
        is_layer = any(other.shape[d] > 1 for d in other.kept)
        if any(x.at(side.summed) for x in side.value.outputs):
            if other.value.open:  # in x A (y B)^T: B comes before A, and A before B
                reader.follow(_values.open_of(values))
            elif is_layer and other.value == _DATA:  # of a model that is not trained
                reader.follow(side.value.open)
            elif is_layer and other.value == _NUMBERS:
                reader.may_follow(side.value.open)
        if is_layer:  # over whose outputs it sums is not known any more
            known = {x.use for x in side.value.outputs}
            reader.may_follow(side.value.open - known)
        for x in side.value.tracked:
            if _is_matrix(x, side, other):
                reader.ask(equation, x, "a matrix that data have a part in")
            tracked.append(x.moved(side.moved(other)))
    result = activation(values, [x for x in tracked if x.all_axes])
    is_numbers = left.summed or all(x.is_indicator is False for x in values)
    return dataclasses.replace(result, is_indicator=False if is_numbers else None)


def _is_matrix(x: Tracked, side: _Side, other: _Side) -> bool:
    """Whether an activation that is made of a parameter is a matrix in a product.

    Such is ``(w + change) @ x``, and a mixture of experts' matrices before a product.
    Queries have a time of their own besides the axes of their kernel.
    """
    if isinstance(x, Output):
        is_alone = all(side.shape[d] == 1 or x.at([d]) for d in side.kept)
        is_product = any(other.shape[d] > 1 for d in other.kept)
        sides = [x.at(places) & x.use.outputs for places in (side.summed, side.kept)]
        return is_alone and is_product and all(sides) and sides[0] != sides[1]
    return isinstance(x, Mixed) and bool(x.at(side.summed) and x.at(side.kept))


def _learned_input(reader, equation, sides: list[_Side]) -> None:
    """Makes one of two parameters the input of the other, where that is clear.

    A vector is, or what is repeated for each example of a batch, as latents are.
    """

    def is_vector(side):
        return all(not x.is_lost and len(x.covered) < 2 for x in side.value.weights)

    def is_repeated(side):
        weights = side.value.weights
        return not any(x.is_lost for x in weights) and any(
            all(_axes.is_repeated(x.dims[d]) for x in weights)
            for d in range(len(side.shape))
        )

    for is_input in (is_vector, is_repeated):
        told = [is_input(side) for side in sides]
        if told[0] != told[1]:
            i = told.index(True)
            for x in sides[i].value.weights:
                reader.record(equation, x.parameter, "elementwise", "a learned input")
            sides[i] = dataclasses.replace(sides[i], value=Value("activation"))
            return


def _tell_apart(reader: Reader, side: _Side, partner: _Side) -> None:
    """What a product says of the output axes of an earlier one."""
    for x in side.value.outputs:
        summed, batch = x.at(side.summed), x.at(side.batch)
        if is_weight(partner.value):
            # In step with an axis of a parameter: each expert has its own.
            pairs = zip(side.batch, partner.batch, strict=True)
            for own, others in pairs:
                if any(w.is_lost for w in partner.value.weights):
                    continue
                of_parameter = any(w.at([others]) for w in partner.value.weights)
                reader.tell(x, x.at([own]), "separate" if of_parameter else "joined")
            if len(summed) > 1:  # the output projection of attention sums over heads
                reader.tell(x, summed, "joined")
            elif all(side.shape[d] == 1 or x.dims[d] in _alone(x) for d in side.summed):
                reader.tell(x, summed, "alone")
            continue
        reader.tell(x, batch, "joined")  # queries meet the keys of their head
        if partner.value.is_indicator is not False:
            reader.tell(x, summed, "selected")
            continue
        # Queries are summed with several keys, experts' outputs with one gate.
        if any(partner.shape[d] > 1 for d in partner.kept):
            reader.tell(x, summed, "joined")


def _alone(x: Output) -> list[Dim]:
    """The axes of a value that are an axis of the parameter and nothing else."""
    return [dim for dim in x.dims if len(dim) == 1 and dim[0].axis >= 0]


@handles("conv_general_dilated")
def _convolution(reader, equation, values, needed):
    data, kernel = values
    if not is_weight(kernel) or is_weight(data):
        for x in kernel.outputs if is_data(kernel) else ():
            reader.ask(equation, x, "a kernel that data have a part in")
        if is_data(data):  # as of a model that is not trained
            reader.follow(data.open)
        return unknown(reader, equation, values, needed)
    if data is None:
        lost = (x.lose(CONSTANT) for x in kernel.weights)
        return [Value("weight", _values.unique(lost))]
    reader.follow(data.open)
    out, into, *window = equation.params["dimension_numbers"].rhs_spec
    uses = set()
    for x in kernel.weights:
        if x.is_lost:
            reader.ask(equation, x, f"a convolution after {x.lost}")
            continue
        sides = x.at([into, *window]), x.at([out])
        use = reader.record(
            equation, x.parameter, "convolution", "kernel", *sides, x.stack
        )
        uses |= {use} - {None}
    return [Value("activation", (), frozenset(uses) or data.open)]


@handles("gather")
def _gather(reader, equation, values, needed):
    value, places = values
    if is_weight(places) or value is None:
        return unknown(reader, equation, values, needed)
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
        return [look_up(reader, equation, value, move, picked, is_data(places))]
    if places is None and math.prod(equation.invars[1].aval.shape[:-1]) == 1:
        return [cut(reader, equation, value, old, sizes).moved(move)]  # a slice
    if is_given(places):
        chosen = [d for d in numbers.start_index_map if sizes[d] < old[d]]
        reader.select(value, chosen)
    return unknown(reader, equation, values, needed)
