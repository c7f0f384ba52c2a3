"""Parameters seen as stacks of matrices: there and back, scale, rank, messages."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax._matrix_view import make_view, resolve_rank

# name: shape, fan-in axes, fan-out axes, (batch, rows, cols), whether rows are fan-out
VIEWS = {
    "wide": ((3, 5), 0, 1, (), 5, 3, True),
    "tall": ((5, 3), 0, 1, (), 5, 3, False),
    "square": ((4, 4), 0, 1, (), 4, 4, True),
    "torch": ((5, 3), 1, 0, (), 5, 3, True),
    "row": ((1, 6), 0, 1, (), 6, 1, True),
    "batch-middle": ((3, 2, 5), 0, 2, (2,), 5, 3, True),
    "batch-around": ((2, 3, 4, 5), 1, 3, (2, 4), 5, 3, True),
    "query": ((6, 2, 4), 0, (1, 2), (), 8, 6, True),
    "query-narrow": ((9, 2, 4), 0, (1, 2), (), 9, 8, False),
    "out": ((2, 4, 6), (0, 1), 2, (), 8, 6, False),
    "out-stack": ((3, 2, 4, 6), (1, 2), 3, (3,), 8, 6, False),
    "batch-splits-fan-out": ((2, 6, 4), 1, (0, 2), (), 8, 6, True),
    "negative-axes": ((2, 3, 5), -2, -1, (2,), 5, 3, True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_element_lands_in_its_row_and_column_and_comes_back(name):
    shape, fan_in, fan_out, sizes, rows, cols, rows_are_fan_out = VIEWS[name]
    view = make_view(shape, fan_in, fan_out)
    assert view.fan_out == (rows if rows_are_fan_out else cols)
    x = jnp.arange(math.prod(shape)).reshape(shape)
    matrix = np.asarray(view.to_matrix(x))
    assert matrix.shape == (*view.batch, view.rows, view.cols) == (*sizes, rows, cols)
    np.testing.assert_array_equal(view.product(view.to_matrix(x), jnp.eye(cols)), x)

    def flat(index, axes):
        axes = [a % len(shape) for a in (axes if isinstance(axes, tuple) else (axes,))]
        sizes = [shape[a] for a in axes]
        return int(np.ravel_multi_index([index[a] for a in axes], sizes))

    for value, index in enumerate(itertools.product(*map(range, shape))):
        place = flat(index, fan_out), flat(index, fan_in)
        batch = tuple(index[a] for a in view.batch_axes)
        assert matrix[(*batch, *(place if rows_are_fan_out else place[::-1]))] == value


@pytest.mark.parametrize(
    ("shape", "fan_in", "fan_out", "message"),
    [
        pytest.param((3, 4), 0, 2, "output_axis", id="high"),
        pytest.param((3, 4), -3, 1, "reduction_axis", id="low"),
        pytest.param((3, 4), 1, -1, "not a matrix", id="same"),
        pytest.param((3, 4, 5), (0, 0), 1, "reduction_axis", id="twice-in-one"),
        pytest.param((3, 4), (), 1, "not a matrix", id="none"),
        pytest.param((0, 3, 4), 1, 2, "not a matrix", id="no-elements"),
    ],
)
def test_axes_that_do_not_fit(shape, fan_in, fan_out, message):
    with pytest.raises(ValueError, match=message):
        make_view(shape, fan_in, fan_out)


@pytest.mark.parametrize(
    ("rank", "shape", "expected"),
    [
        pytest.param(1, (100, 30), 1, id="one-is-rank-one"),
        pytest.param(1.0, (100, 30), 30, id="one-point-zero-is-full"),
        pytest.param(31, (100, 30), 30, id="clipped"),
        pytest.param(0.25, (100, 30), 8, id="rounded-up"),
        pytest.param(0.5, (30, 100), 15, id="of-the-smaller-side"),
        pytest.param(1e-9, (100, 30), 1, id="at-least-one"),
        pytest.param(0.07, (100, 100), 7, id="seven-percent-is-seven"),
    ],
)
def test_resolve_rank(rank, shape, expected):
    assert resolve_rank(min(shape), rank) == expected
