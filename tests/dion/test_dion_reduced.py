"""What Dion sends over replicas, and what it tells and asks of a `reduce_fn`."""

import math
import re

import jax
import numpy as np
import pytest
from dion_replicas import (
    REPLICAS,
    SHAPES,
    compiled,
    local_gradients,
    sends_factors,
    state_of,
)
from dion_runs import rank_of, zeros

import curvadion_jax as cd

# Ranks 1, 2, 3 and 5 of 5; (9 + 5) r < 45 up to r = 3.
RANKS = [
    pytest.param(1, marks=pytest.mark.slow),
    0.25,
    pytest.param(0.5, marks=pytest.mark.slow),
    1.0,
]


def all_reduces(hlo):
    """Elements of each all-reduce in compiled HLO, those of a tuple together."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo)
    sizes = [re.findall(r"[a-z0-9]+\[([\d,]*)\]", shapes) for shapes in found]
    return [
        sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
        for shapes in sizes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["sync", "reduce_fn"])
@pytest.mark.parametrize("rank", RANKS)
def test_what_is_sent(rank, by):
    """(rows + cols) r elements a matrix in two rounds, or the matrix itself."""
    with jax.enable_x64(True):
        _, state = state_of(rank, by)
        state = jax.tree.map(lambda x: np.stack([x] * REPLICAS), state)
        step = compiled(rank, "shard_map", by)
        hlo = step.lower(state, local_gradients()).compile().as_text()
    matrices, r = 4, rank_of((5, 9), rank)
    sizes = [9 * r, 5 * r] if sends_factors(rank) else [9 * 5]
    sent = all_reduces(hlo)  # and no vote, since every step synchronises
    assert sent == [matrices * size for size in sizes]


@pytest.mark.parametrize("rank", [2, 1.0])
def test_reduce_fn_is_told_what_arrays_are_made_of(rank):
    """The axes of an array have the sizes of the parameter's, or the rank's."""
    numbers = {"wide": (0, 1), "tall": (0, 1), "stack": (2, 1)}
    numbers = {name: cd.DimensionNumbers(*pair) for name, pair in numbers.items()}
    tx, given = cd.scale_by_dion(rank, dimension_numbers=numbers), []

    def mean(arrays, made_of):
        for name, x in arrays.items():
            shape, axes = made_of[name]
            assert shape == SHAPES[name]
            sizes = [math.prod(shape[axis] for axis in of) if of else r for of in axes]
            assert x.shape == tuple(sizes)
        given.append(sorted(arrays))
        return arrays, None

    params, r = zeros(SHAPES, np.float32), rank_of((5, 9), rank)
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, reduce_fn=mean), params)
    assert given == [sorted(SHAPES)] * (2 if sends_factors(rank) else 1)
