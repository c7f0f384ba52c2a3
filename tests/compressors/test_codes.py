"""Numbers in few bits, against NumPy's."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax.compressors import _codes, _quantize


def packed_by_numpy(values, width):
    """Groups that fill whole bytes, of one integer from each of equally long runs."""
    group = math.lcm(width, 8) // width
    pad = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % group)]
    groups = np.pad(values, pad).reshape(*values.shape[:-1], group, -1).swapaxes(-1, -2)
    bits = (groups[..., None] >> np.arange(width)) & 1
    flat = bits.reshape(*groups.shape[:-1], -1).astype(np.uint8)
    packed = np.packbits(flat, axis=-1, bitorder="little").swapaxes(-1, -2)
    return packed.reshape(*values.shape[:-1], -1)


@functools.partial(jax.jit, static_argnums=1)
def packed_and_back(values, width):
    packed = _codes.pack(values, width)
    return packed, _codes.unpack(packed, width, values.shape[-1])


@functools.partial(jax.jit, static_argnums=1)
def encoded_and_back(x, bits):
    codes, scales = _codes.encode(x, bits)
    return codes, scales, _codes.decode(codes, scales, x.shape[-1], bits)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 12, 13, 16, 24, 31, 32])
@pytest.mark.parametrize("count", [1, 9, 16])
def test_packed_bits_are_numpys_and_come_back(width, count):
    rng = np.random.default_rng(width)
    values = rng.integers(2**width, size=(3, count))
    values[0, 0] = 2**width - 1
    packed, back = packed_and_back(values.astype(np.int32), width)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, packed_by_numpy(values, width))
    assert packed.shape[-1] == _codes.packed_bytes(count, width)
    np.testing.assert_array_equal(back, values)


def heavy_tailed(seed=0, shape=(50, 128)):
    return np.random.default_rng(seed).standard_t(2, size=shape).astype(np.float32)


def two_bits(x):
    return encoded_and_back(x, 2)[-1]


def test_two_bits_lose_less_than_there_was_however_large_one_element_is():
    x = heavy_tailed()
    x[0, 0], x[1] = 1e6, 0.5
    lost = np.linalg.norm(x - two_bits(x), axis=-1) / np.linalg.norm(x, axis=-1)
    assert lost.max() < 1
    # Steps of the largest value, as 8 and 4 bits have them, would lose more than all.
    step = np.abs(x).max(-1, keepdims=True) / 3
    steps = np.sign(x) * np.where(np.abs(x) > 2 * step, 3, 1) * step
    assert np.linalg.norm(x - steps) > np.linalg.norm(x)


def test_two_bits_keep_the_sum_of_magnitudes():
    # Both levels are means. float32 sums of 128 numbers; measured: 3e-7.
    x = heavy_tailed(1)
    expected = np.abs(x).astype(float).sum(-1)
    np.testing.assert_allclose(np.abs(two_bits(x)).sum(-1), expected, rtol=2e-6)


@pytest.mark.parametrize("bits", _codes.BITS)
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e37])
def test_equal_magnitudes_are_kept_at_any_size(bits, scale):
    x = np.where(np.arange(8) % 3 == 0, -1, 1) * np.float32(scale)
    *_, found = encoded_and_back(x.astype(np.float32), bits)
    np.testing.assert_allclose(found, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", _codes.BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(bits, bad):
    x = np.ones((2, 8), np.float32)
    x[1, 5] = bad
    *_, decoded = encoded_and_back(x, bits)
    np.testing.assert_allclose(decoded[0], 1, rtol=1e-6)
    assert np.isnan(decoded[1]).all()


@pytest.mark.parametrize("bits", _codes.BITS)
def test_bytes_of_codes_and_scales(bits):
    codes, scales, _ = encoded_and_back(np.ones((3, 13), np.float32), bits)
    assert codes.nbytes + scales.nbytes == _codes.encoded_bytes(3, 13, bits)


def padded_size(shape):
    """Elements of an array as TPUs lay it out, in tiles of 8 x 128."""
    *more, rows, columns = (1, 1, *shape)
    return math.prod(more) * -(-rows // 8) * 8 * -(-columns // 128) * 128


@pytest.mark.parametrize("bits", _codes.BITS)
def test_no_array_has_a_short_last_axis(bits):
    """[blocks, 64, 4] would take 32 times its memory on a TPU."""
    blocks, block = 1024, 256

    def there_and_back(x):
        return _quantize._from_rows(_quantize._to_rows(x, bits), block, bits)

    program = jax.make_jaxpr(there_and_back)(jnp.ones((blocks, block))).jaxpr
    shapes = [out.aval.shape for x in helpers.equations(program) for out in x.outvars]
    # Rows of 256 codes and a scale take 384.
    assert max(map(padded_size, shapes)) <= 1.5 * blocks * block
