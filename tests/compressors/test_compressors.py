"""Compressed means over replicas: what they conserve, and what they cost."""

import helpers
import jax
import numpy as np
import pytest
from compressor_runs import (
    ATOL,
    REPLICAS,
    SHAPES,
    average,
    averaging,
    one_of,
    sent,
    trees,
    views_of,
)

from curvadion_jax import _collectives, compressors
from curvadion_jax._local_step import LocalStep
from curvadion_jax.compressors._base import check_compressor
from curvadion_jax.synchronizers._base import mean_with_feedback

ALL = {
    "exact": compressors.exact(),
    "int8": compressors.quantize(8, block=16),
    "int4": compressors.quantize(4, block=16),
    "int2": compressors.quantize(2, block=16),
    "int1": compressors.quantize(1, block=16),
    "int2-int8": compressors.quantize(2, block=16, mean_bits=8),
}


QUICK = ("exact", "int2")
every = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ALL],
)


@jax.tree_util.register_pytree_node_class
class Node:
    """A user's own, which does not know what is equal."""

    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_tree_of_nodes_that_know_no_equality():
    form = compressors.quantize(8)
    stacked = Node(np.ones((2, 4, 8), np.float32))

    def mean(tree):
        group = _collectives.Replicas(helpers.AXIS)
        return check_compressor(form).average(tree, (), group, {}).mean

    found = jax.vmap(mean, axis_name=helpers.AXIS)(stacked)
    np.testing.assert_allclose(found.w, 1)


@every
@pytest.mark.parametrize("run", ["vmap", pytest.param("mesh", marks=pytest.mark.slow)])
def test_what_is_sent_has_the_mean_that_all_get(name, run):
    result = average(ALL[name], trees(), run)
    for key in SHAPES:
        for replica in range(1, REPLICAS):
            helpers.assert_bitwise(result.mean[key][replica], result.mean[key][0])
        np.testing.assert_allclose(
            sent(result, trees(), key).mean(0), result.mean[key][0], rtol=0, atol=ATOL
        )
    for leaf in jax.tree.leaves(result.state):
        assert len({row.tobytes() for row in leaf}) == 1


@every
def test_error_feedback_conserves(name):
    """Sent plus held is what there was, over several rounds."""
    mapped, state = averaging(ALL[name], trees())
    held = {key: np.zeros_like(x) for key, x in trees().items()}
    total, arrived = 0, 0
    for seed in range(3):
        fresh = trees(seed)
        tree = {key: fresh[key] + held[key] for key in fresh}
        result = jax.device_get(mapped(tree, state))
        held = result.unsent
        state = jax.tree.map(lambda x: x[0], result.state)
        total = total + fresh["tall"].astype(float).mean(0)
        arrived = arrived + result.mean["tall"][0].astype(float)
    np.testing.assert_allclose(
        arrived + held["tall"].astype(float).mean(0), total, rtol=0, atol=ATOL
    )


@every
def test_error_feedback_sends_all_of_a_constant_in_the_end(name):
    """What is held stays bounded, so that its share in what was sent falls as 1/t."""
    stacked, steps = trees(), 40
    mapped, state = averaging(ALL[name], stacked)
    held = {key: np.zeros_like(x) for key, x in stacked.items()}
    for _ in range(steps):
        tree = {key: stacked[key] + held[key] for key in stacked}
        result = jax.device_get(mapped(tree, state))
        held = result.unsent
        state = one_of(result.state)
    for key, rest in held.items():
        # Measured: at most 15.3 times the mean (`int1`, a bias of 5 elements in a block
        # of 16, whose zeros make its one magnitude too small), others 5.1. Without
        # feedback 40 sends of `int2` would miss 18 times the mean, others more.
        size = np.linalg.norm(stacked[key].mean(0))
        limit = 16 if name == "int1" else 12
        assert np.linalg.norm(rest.mean(0)) < limit * size


def of_weight(weight):
    """A replica's part in a sync."""
    return LocalStep((), (), (), {}, tuple, weight=weight)


def brought(tree, weight):
    """What a replica of this weight brings to a mean."""
    return of_weight(weight).weighted(tree)


def test_one_replica_puts_in_all():
    tree = {"w": np.float32([1, np.nan, 3])}
    for form in (compressors.exact(), *ALL.values()):
        result = form.average(tree, (), _collectives.Replicas(), {})
        np.testing.assert_array_equal(result.mean["w"], tree["w"])
        np.testing.assert_array_equal(result.unsent["w"], [0, 0, 0])


def test_one_replica_without_weight_puts_in_nothing():
    tree = brought({"w": np.float32([1, np.nan, 3])}, 0.0)
    for form in (compressors.exact(), *ALL.values()):
        result = form.average(tree, (), _collectives.Replicas(), {})
        np.testing.assert_array_equal(result.mean["w"], [0, 0, 0])
        np.testing.assert_array_equal(result.unsent["w"], [0, 0, 0])


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_one_replica_without_weight_pays_what_it_owes(weight):
    tree, owed = {"w": np.float32([1, 2, 3])}, {"w": np.float32([4, 5, 6])}
    for form in (compressors.exact(), *ALL.values()):
        mean, residual, _ = mean_with_feedback(
            form, tree, owed, (), of_weight(weight), _collectives.Replicas()
        )
        np.testing.assert_array_equal(mean["w"], [5, 7, 9] if weight else owed["w"])
        np.testing.assert_array_equal(residual["w"], [0, 0, 0])


@every
def test_what_one_without_weight_has_is_in_no_mean(name):
    """Compressors know no weights: they are given arrays times these, or zeros."""
    weights = [1.5, 0.0, 0.5, 2.0]
    given = trees(6)
    given["tall"][1, 2, 3] = np.nan
    parts = [
        brought(jax.tree.map(lambda x, k=k: x[k], given), weight)
        for k, weight in enumerate(weights)
    ]
    stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
    result = average(ALL[name], stacked)
    for key in SHAPES:
        mean = result.mean[key][0]
        assert np.isfinite(mean).all()
        put_in = sent(result, stacked, key)
        np.testing.assert_allclose(put_in.mean(0), mean, rtol=0, atol=ATOL)
        if name == "exact":
            there = np.delete(given[key], 1, axis=0)
            expected = np.average(there, axis=0, weights=np.delete(weights, 1))
            np.testing.assert_allclose(mean, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        # 5 + 480 + 1152 + 300 elements.
        pytest.param(compressors.exact(), 4 * 1937, id="exact"),
        # Blocks of 16: 1 + 30 + 72 + 19, of 16 or 8 bytes and a scale.
        pytest.param(compressors.quantize(8, 16), 122 * 20, id="int8"),
        pytest.param(compressors.quantize(4, 16), 122 * 12, id="int4"),
        # Codes of 4 bytes and two scales.
        pytest.param(compressors.quantize(2, 16), 122 * 12, id="int2"),
        pytest.param(compressors.quantize(1, 16), 122 * 6, id="int1"),
        # One stage of 12 and one of 20 bytes a block.
        pytest.param(ALL["int2-int8"], 122 * 16, id="int2-int8"),
    ],
)
def test_payload_by_hand(compressor, expected):
    one = one_of(trees())
    payload = compressor.payload(one, views_of(one))
    assert payload == compressors.Payload(averaged=expected)
