"""Means of few bits: against NumPy over a list of replicas, pieces, bytes."""

import functools
import re

import chex
import helpers
import jax
import numpy as np
import pytest
from compressor_runs import (
    ATOL,
    REPLICAS,
    average,
    collectives,
    one_of,
    sent_bytes,
    trees,
)

from curvadion_jax import _buckets, compressors

# Two last digits of a number below 4: a loop rounds a mean's second encoding elsewhere.
PIECES_ATOL = 2 * 2.0**-22
KINDS = re.compile(r"\b([a-z]+\d+)\[")


def encoded(x, bits, block):
    """What the codes of a flat float32 array stand for, of whole blocks."""
    if bits == 1:
        means = [np.abs(row).mean() for row in x.reshape(-1, block)]
        return np.where(x < 0, -1, 1) * np.repeat(means, block)
    if bits == 2:
        return np.concatenate([two_magnitudes(row) for row in x.reshape(-1, block)])
    levels = 2 ** (bits - 1) - 1
    blocks = x.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(levels)
    return (np.round(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(-1)


def filled(x, block):
    """A flat array with its last elements once more until their block is full."""
    whole = x.size - x.size % block
    return np.concatenate(
        [x[:whole], *[np.resize(x[whole:], block)] * (whole < x.size)]
    )


def two_magnitudes(row):
    size = np.abs(row)
    large = size > size.mean()
    level = [size[m].mean() if m.any() else 0 for m in (~large, large)]
    return np.where(row < 0, -1, 1) * np.where(large, level[1], level[0])


@pytest.mark.parametrize("bits", [1, 2, 8])
def test_quantised_means_are_the_references(bits):
    block, stacked = 16, trees(3)
    form = compressors.quantize(bits, block)
    result = average(form, stacked)
    for name, values in stacked.items():
        size = values[0].size
        rows = [filled(row, block) for row in values.reshape(REPLICAS, -1)]
        first = np.stack([encoded(row, bits, block) for row in rows])
        mean = encoded(first.mean(0, dtype=np.float32), bits, block)[:size]
        np.testing.assert_allclose(result.mean[name][0].reshape(-1), mean, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 8])
def test_two_replicas_round_once(monkeypatch, bits):
    block, stacked = 16, trees(3, replicas=2)
    stacked["stack"][1] = 0  # who is absent brings zeros
    empty = {name: np.zeros((2, *shape)) for name, shape in helpers.NOTHING.items()}
    empty = jax.tree.map(np.float32, empty)
    form = compressors.quantize(bits, block)
    result = average(form, stacked | empty, "mesh")
    for name, x in empty.items():
        assert result.mean[name].shape == x.shape
    for name, values in stacked.items():
        size = values[0].size
        rows = [filled(row, block) for row in values.reshape(2, -1)]
        put_in = np.stack([encoded(row, bits, block)[:size] for row in rows])
        for index, own in enumerate(values.reshape(2, -1)):
            mean, unsent = result.mean[name][index], result.unsent[name][index]
            np.testing.assert_allclose(mean.reshape(-1), put_in.mean(0), atol=ATOL)
            np.testing.assert_allclose(
                unsent.reshape(-1), own - put_in[index], atol=ATOL
            )
    helpers.assert_bitwise(*({k: x[i] for k, x in result.mean.items()} for i in (0, 1)))
    monkeypatch.setattr(_buckets, "PIECE", 256)
    helpers.assert_bitwise(average(form, stacked | empty, "mesh"), result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        # A rest of rows and one of numbers.
        ((2, 42, 16), [16, 16, 16, 16, 16, 4]),
        ((770,), [256, 256, 256, 2]),
        # The last piece ends within a block.
        ((43, 10), [24, 19]),
    ],
)
def test_large_arrays_in_pieces_are_the_same_up_to_rounding(monkeypatch, shape, pieces):
    """One of several in a message, so that a replica's part ends within a piece."""
    rng = np.random.default_rng(8)
    stacked = {
        name: rng.normal(size=(REPLICAS, *size)).astype(np.float32)
        for name, size in {"a": (7,), "large": shape, "z": (5, 9)}.items()
    }
    form = compressors.quantize(4, block=16)
    whole = average(form, stacked)
    monkeypatch.setattr(_buckets, "PIECE", 256)
    cut = _buckets.Bucket([stacked["large"][0]], 16, 0)
    assert [cut.piece_rows] * cut.pieces + [cut.last_rows] == pieces
    found = average(form, stacked)
    chex.assert_trees_all_close(found, whole, atol=PIECES_ATOL, rtol=0)
    # What is rounded differently is sent, so all replicas have the same mean.
    first, *others = ([x[i] for x in found.mean.values()] for i in range(REPLICAS))
    for other in others:
        helpers.assert_bitwise(other, first)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_arrays_share_no_scale(bits):
    # Neither fills a block of 64, and one would vanish beside the other.
    stacked = {
        "large": np.full((REPLICAS, 40), 1e6, np.float32),
        "small": np.full((REPLICAS, 40), 1e-6, np.float32),
    }
    mean = average(compressors.quantize(bits, 64), stacked).mean
    for name, values in stacked.items():
        np.testing.assert_allclose(mean[name], values, rtol=1e-6)


def test_no_elements_are_no_blocks_and_zeros_stay_zeros():
    stacked = {"bias": np.zeros((REPLICAS, 0), np.float32)}
    form = compressors.quantize(2)
    assert form.payload(one_of(stacked)).averaged == 0
    stacked |= {"zeros": np.zeros((REPLICAS, 64), np.float32)}
    helpers.assert_bitwise(average(form, stacked).mean, stacked)


@pytest.mark.parametrize("bits", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_small_numbers_are_what_crosses_the_link(bits):
    # 4, 12 and 8 blocks, which four replicas share unpadded, in one message a stage.
    shapes = {"bias": (64,), "embed": (16, 12), "tall": (32, 4)}
    stacked = {key: np.ones((REPLICAS, *s), np.float32) for key, s in shapes.items()}
    compressor = compressors.quantize(bits, 16)
    moved = collectives(compressor, stacked)
    assert [each.opcode for each in moved] == ["all-to-all", "all-gather"]
    assert {kind for each in moved for kind in KINDS.findall(each.shape)} == {"u8"}
    elements = sum(np.prod(shape) for shape in shapes.values())
    expected = 2 * (elements * bits / 8 + elements / 16 * (8 if bits == 2 else 4))
    assert sum(each.bytes for each in moved) == expected
    payload = compressor.payload(one_of(stacked))
    assert sent_bytes(moved) == sum(each.bytes for each in moved) * 3 / 4
    assert sent_bytes(moved) == 2 * payload.averaged * 3 / 4


def test_two_replicas_send_one_message_of_as_many_bytes():
    # 4, 12 and 8 blocks.
    shapes = {"bias": (64,), "embed": (16, 12), "tall": (32, 4)}
    stacked = {key: np.ones((2, *s), np.float32) for key, s in shapes.items()}
    form = compressors.quantize(2, 16)
    moved = collectives(form, stacked)
    assert [each.opcode for each in moved] == ["all-gather"]
    sent = form.payload(one_of(stacked)).averaged
    assert sent_bytes(moved, 2) == sent == 24 * (16 * 2 / 8 + 8)


@pytest.mark.parametrize("bits", [1, 2])
def test_a_few_blocks_at_a_time_have_the_codes_of_all_at_once(bits):
    """Two rounds of a loop and a shorter one; scales to a rounding of their sum."""
    rng = np.random.default_rng(0)
    blocks = rng.normal(size=(2 * compressors._FEW_BLOCKS + 3, 16)).astype(np.float32)
    few, all_at_once = (
        jax.jit(encode, static_argnums=1)(blocks, bits)
        for encode in (compressors._encode_blocks, compressors._encode_few)
    )
    codes = 16 * bits // 8  # bytes in front of the scales
    np.testing.assert_array_equal(few[:, :codes], all_at_once[:, :codes])
    decode = functools.partial(compressors._decode_blocks, block=16, bits=bits)
    np.testing.assert_allclose(decode(few), decode(all_at_once), rtol=1e-6)
