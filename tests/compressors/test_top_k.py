"""The largest elements: against NumPy over a list of replicas, ties, bytes."""

import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressor_runs import ATOL, REPLICAS, average, collectives, sent_bytes, trees

from curvadion_jax import _collectives, compressors

pytestmark = pytest.mark.slow

top_k = compressors.top_k
Payload = compressors.Payload


def kept_by_numpy(x, fraction, block):
    """A flat array with all but the largest elements of each block zero."""
    blocks = math.ceil(x.size / block)
    length = math.ceil(x.size / blocks)
    kept = np.zeros_like(x)
    for start in range(0, x.size, length):
        part = x[start : start + length]
        order = np.argsort(-np.abs(part), kind="stable")  # the first of equals
        chosen = start + order[: math.ceil(fraction * length)]
        kept[chosen] = x[chosen]
    return kept


@pytest.mark.parametrize(
    ("fraction", "block"), [(0.1, 100), (0.5, 7), (1 / 32, None), (1.0, 64)]
)
def test_means_are_the_references(fraction, block):
    stacked = trees(3)
    result = average(top_k(fraction, block=block), stacked)
    for name, values in stacked.items():
        flat = values.reshape(REPLICAS, -1)
        own = [kept_by_numpy(x, fraction, block or x.size) for x in flat]
        unsent = result.unsent[name].reshape(flat.shape)
        np.testing.assert_array_equal(unsent, flat - np.array(own))
        mean = np.mean(own, axis=0, dtype=float).reshape(values[0].shape)
        np.testing.assert_allclose(result.mean[name][0], mean, rtol=0, atol=ATOL)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounded_values_stand_where_the_largest_do(bits):
    values = trees(4)["tall"]
    result = average(top_k(0.1, bits, block=None), {"tall": values})
    for x, unsent in zip(values, result.unsent["tall"], strict=True):
        sent = x - unsent
        kept = kept_by_numpy(x.reshape(-1), 0.1, x.size).reshape(x.shape)
        np.testing.assert_array_equal(unsent == x, kept == 0)
        np.testing.assert_array_equal(np.sign(sent), np.sign(kept))
        # Half a step of 8 and 4 bits; between two magnitudes with 2.
        step = np.abs(kept).max() / {8: 127, 4: 7, 2: 2}[bits]
        np.testing.assert_allclose(sent, kept, rtol=0, atol=0.5 * step + 1e-6)


def test_the_first_of_equals_is_sent():
    x = np.array([1, -2, 2, -2, 0, 2, 1, 2], np.float32)
    result = average(top_k(3 / 8), {"w": np.stack([x] * REPLICAS)})
    np.testing.assert_array_equal(result.mean["w"][0], [0, -2, 2, -2, 0, 0, 0, 0])


@pytest.mark.parametrize("bits", [None, 8, 4, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_sent_first(bits, bad):
    stacked = {"w": np.full((REPLICAS, 32), 1e6, np.float32)}
    stacked["w"][2, 7] = bad
    mean = average(top_k(1 / 16, bits), stacked).mean["w"]
    assert not np.isfinite(mean[:, 7]).any()


@pytest.mark.parametrize("bits", [None, 2])
def test_scalars_empty_and_small_arrays_and_bfloat16(bits):
    shapes = {"scalar": (), "empty": (0, 3), "one": (1,), "two": (2,)}
    stacked = {
        name: jnp.full((REPLICAS, *shape), 1.5, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    compressor = top_k(0.1, bits)
    result = average(compressor, stacked)
    for name, shape in shapes.items():
        expected = np.full((REPLICAS, *shape), 1.5, np.float32)
        if name == "two":
            expected[:, 1] = 0
        np.testing.assert_array_equal(result.mean[name], expected)
        np.testing.assert_array_equal(result.unsent[name], 1.5 - expected)
    # One value and one bit of a position, which takes a byte, for "two".
    one = 4 if bits is None else 1 + 8
    shapes = jax.tree.map(lambda x: x[0], stacked)
    assert compressor.payload(shapes, {}) == Payload(gathered=3 * one + 1)


def test_one_replica_keeps_its_own():
    tree = {"w": jnp.arange(5, dtype=jnp.bfloat16)}
    result = top_k(0.1).average(tree, (), _collectives.Replicas(), {})
    helpers.assert_bitwise(result.mean, tree)
    assert not result.unsent["w"].any()


@pytest.mark.parametrize(
    ("bits", "block", "dtypes"),
    [(None, 100, {"f32", "u8"}), (8, 300, {"f32", "s8", "u8"}), (2, 64, {"f32", "u8"})],
)
def test_what_crosses_the_link_is_what_the_payload_says(bits, block, dtypes):
    stacked = trees()
    compressor = top_k(0.1, bits, block)
    moved = collectives(compressor, stacked)
    assert {each.opcode for each in moved} == {"all-gather"}
    assert {each.shape.partition("[")[0].strip("(") for each in moved} == dtypes
    payload = compressor.payload(jax.tree.map(lambda x: x[0], stacked), {})
    assert payload.averaged == 0
    assert sent_bytes(moved) == (REPLICAS - 1) * payload.gathered


@pytest.mark.parametrize(
    ("compressor", "shape", "expected"),
    [
        # 41 of 4096: 4 bytes each, and 12 bits each of an even number: 63 bytes.
        pytest.param(top_k(0.01), (64, 64), 41 * 4 + 63, id="float32"),
        pytest.param(top_k(0.01, 8), (64, 64), 41 + 4 + 63, id="8-bits"),
        pytest.param(top_k(0.01, 4), (64, 64), 21 + 4 + 63, id="4-bits"),
        pytest.param(top_k(0.01, 2), (64, 64), 11 + 8 + 63, id="2-bits"),
        # 4097 in two blocks of 2049, 21 each.
        pytest.param(top_k(0.01), (17, 241), 2 * (21 * 4) + 63, id="two-blocks"),
        pytest.param(top_k(0.25, block=256), (512,), 2 * 64 * (4 + 1), id="bytes"),
        # 0.07 x 100 is above 7 in floating point.
        pytest.param(top_k(0.07), (100,), 7 * 4 + 7, id="rounded"),
        pytest.param(top_k(1.0), (100,), 400, id="all"),
        # Positions of 31 bits at most: two blocks of 2^31, half of each.
        pytest.param(
            top_k(0.5, block=None), (2**32,), 2**31 * 4 + 2**31 // 8 * 31, id="huge"
        ),
    ],
)
def test_payload_by_hand(compressor, shape, expected):
    tree = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    assert compressor.payload(tree, {}) == Payload(gathered=expected)
