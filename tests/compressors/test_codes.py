"""Numbers in few bits, against NumPy's."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax.compressors import _decode_blocks, _encode_blocks, _pack, _unpack

every_bits = pytest.mark.parametrize("bits", [8, 4, 2, 1])


@functools.partial(jax.jit, static_argnums=1)
def back(x, bits):
    return _decode_blocks(_encode_blocks(x, bits), x.shape[-1], bits)


@every_bits
def test_packed_codes_come_back_from_equally_long_runs(bits):
    codes = np.random.default_rng(bits).integers(2**bits, size=(3, 16)).astype(np.uint8)
    packed = _pack(jnp.asarray(codes), bits)
    # The codes of a byte, the first in the lowest bits.
    groups = codes.reshape(3, 8 // bits, -1).swapaxes(-1, -2)
    binary = (groups[..., None] >> np.arange(bits)) & 1
    expected = np.packbits(binary.reshape(3, -1), axis=-1, bitorder="little")
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(_unpack(packed, bits), codes)


def test_two_bits_lose_less_than_there_was_however_large_one_element_is():
    x = np.random.default_rng(0).standard_t(2, size=(50, 128)).astype(np.float32)
    x[0, 0], x[1] = 1e6, 0.5
    lost = np.linalg.norm(x - back(x, 2), axis=-1) / np.linalg.norm(x, axis=-1)
    assert lost.max() < 1


@every_bits
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e37])
def test_equal_magnitudes_are_kept_at_any_size(bits, scale):
    x = np.where(np.arange(8) % 3 == 0, -1, 1) * np.float32(scale)
    np.testing.assert_allclose(back(np.float32(x), bits), x, rtol=1e-6, atol=0)


@every_bits
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(bits, bad):
    x = np.ones((2, 8), np.float32)
    x[1, 5] = bad
    decoded = back(x, bits)
    np.testing.assert_allclose(decoded[0], 1, rtol=1e-6)
    assert np.isnan(decoded[1]).all()


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_every_code_keeps_its_number(bits, levels):
    # Multiples of one level, the largest among them: nothing is rounded.
    row = np.resize(np.arange(-levels, levels + 1, dtype=np.float32), 256) / 8
    np.testing.assert_array_equal(back(row, bits), row)


def padded_size(shape):
    """Elements of an array as TPUs lay it out, in tiles of 8 x 128."""
    *more, rows, columns = (1, 1, *shape)
    return math.prod(more) * -(-rows // 8) * 8 * -(-columns // 128) * 128


@every_bits
def test_no_array_has_a_short_last_axis(bits):
    """[blocks, 64, 4] would take 32 times its memory on a TPU."""
    blocks, block = 1024, 256
    program = jax.make_jaxpr(lambda x: back(x, bits))(jnp.ones((blocks, block))).jaxpr
    shapes = [out.aval.shape for x in helpers.equations(program) for out in x.outvars]
    # Rows of 256 codes and a scale take 384.
    assert max(map(padded_size, shapes)) <= 1.5 * blocks * block
