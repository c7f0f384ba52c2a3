"""Numbers in few bits, and numbers of few bits in bytes: what crosses the link.

A code is a multiple of a fraction of its block's largest absolute value (8 and 4 bits),
or a sign and one of its block's two magnitudes (2 bits) or its one magnitude (1 bit).
Pure mathematics, no axis.
"""

import math

import jax
import jax.numpy as jnp

BITS = (8, 4, 2, 1)
_SCALE_BYTES = 4


def encoded_bytes(blocks: int, block: int, bits: int) -> int:
    """Bytes of the codes and scales of so many blocks of so many elements."""
    scales = _SCALE_BYTES * (2 if bits == 2 else 1)
    return blocks * (packed_bytes(block, bits) + scales)


def encode(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    r"""Codes and scales of blocks of numbers.

    With 8 and 4 bits x is rounded to the scale times :math:`\{-L, \dots, L\}`, L = 127
    or 7, where L times the scale is the block's largest absolute value. Two bits are a
    sign and the choice between two magnitudes: the mean of those above the block's mean
    magnitude, and the mean of the others. Means of what they stand for, as in Lloyd's
    condition for the least squared error, make what is lost smaller than what there
    was for any block; steps of the largest value would not, where one element is large.
    One bit is a sign, with the mean magnitude of the block.

    Args:
      x: [..., block], at least float32.
      bits: 8, 4, 2 or 1.

    Returns:
      Codes int8[..., block] or uint8[..., ceil(block bits / 8)], and scales
      float32[..., 1], or [..., 2] for two bits. A block that is not finite has NaN for
      its scales.

    Example:
      >>> codes, scales = encode(jnp.array([1.0, -1.0, 4.0, -6.0]), bits=2)
      >>> codes.tolist(), scales.tolist(), decode(codes, scales, 4, bits=2).tolist()
      ([216], [1.0, 5.0], [1.0, -1.0, 5.0, -5.0])

    References:
      Lloyd, `Least squares quantization in PCM
      <https://doi.org/10.1109/TIT.1982.1056489>`_, 1982
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if bits == 1:
        codes = (x < 0).astype(jnp.int8)
        units = jnp.where(largest == 0, 1, largest)  # whose sum does not overflow
        scales = largest * jnp.mean(jnp.abs(x) / units, axis=-1, keepdims=True)
    elif bits == 2:
        codes, scales = _two_magnitudes(x, largest)
    else:
        scales = largest / (2 ** (bits - 1) - 1)
        codes = jnp.round(x / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    # NaN has no code, and a maximum may drop it: all of its block becomes NaN.
    finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    scales = jnp.where(finite, scales, jnp.nan).astype(jnp.float32)
    return (codes if bits == 8 else pack(codes & (2**bits - 1), bits)), scales


def _two_magnitudes(x, largest):
    # In units of the largest, so that no sum overflows.
    size = jnp.abs(x) / jnp.where(largest == 0, 1, largest)
    is_large = size > jnp.mean(size, axis=-1, keepdims=True)
    means = [
        jnp.sum(jnp.where(chosen, size, 0), axis=-1, keepdims=True)
        / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), 1)
        for chosen in (~is_large, is_large)
    ]
    codes = is_large + 2 * (x < 0).astype(jnp.int8)
    return codes, jnp.concatenate(means, axis=-1) * largest


def decode(codes: jax.Array, scales: jax.Array, block: int, bits: int) -> jax.Array:
    """What codes stand for, float32[..., block]."""
    if bits == 8:
        return codes.astype(scales.dtype) * scales
    codes = unpack(codes, bits, block).astype(jnp.int8)
    if bits == 1:
        return jnp.where(codes > 0, -scales, scales)
    if bits == 2:
        size = jnp.where((codes & 1) > 0, scales[..., 1:], scales[..., :1])
        return jnp.where((codes & 2) > 0, -size, size)
    return jnp.where(codes > 7, codes - 16, codes).astype(scales.dtype) * scales


def packed_bytes(count: int, width: int) -> int:
    """Bytes of `count` integers of `width` bits, as `pack` packs them."""
    group = _group(width)
    return math.ceil(count / group) * (group * width // 8)


def pack(values: jax.Array, width: int) -> jax.Array:
    """Integers without the bits between them.

    They are cut into as many equal runs as there are integers in a group that fills
    whole bytes; the first bytes of the result hold bits of the first integer of every
    run. So no axis is as short as a group: TPUs pad the last axis to 128, and one of 2
    or 4 would take 64 or 32 times the memory.

    Args:
      values: integers [..., n] from 0 to 2^width - 1.
      width: bits of each, 1 to 32.

    Returns:
      uint8[..., packed_bytes(n, width)]: the lowest bytes of all groups, the next, ...,
      with the first run's integer in the lowest bits.

    Example:
      >>> pack(jnp.array([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]
      True
      >>> [hex(x) for x in pack(jnp.array([0xA, 0xB, 0xC, 0xD]), 4).tolist()]
      ['0xca', '0xdb']
    """
    group, bytes_ = _group(width), _group(width) * width // 8
    runs = _runs(values.astype(_dtype(width)), group)
    packed = [
        _combined(runs, [8 * j - i * width for i in range(group)], width, 8)
        for j in range(bytes_)
    ]
    return jnp.concatenate(packed, axis=-1).astype(jnp.uint8)


def unpack(packed: jax.Array, width: int, count: int) -> jax.Array:
    """The integers [..., count] that `pack` was given, uint8 or, above 8 bits, uint32.

    Example:
      >>> unpack(pack(jnp.array([0xABC, 0x123]), 12), 12, 2).tolist() == [0xABC, 0x123]
      True
    """
    group, bytes_ = _group(width), _group(width) * width // 8
    runs = _runs(packed.astype(_dtype(width)), bytes_)
    values = [
        _combined(runs, [i * width - 8 * j for j in range(bytes_)], 8, width)
        & _dtype(width)(2**width - 1)
        for i in range(group)
    ]
    return jnp.concatenate(values, axis=-1)[..., :count]


def _combined(
    runs: list[jax.Array], shifts: list[int], given: int, wanted: int
) -> jax.Array:
    """The lowest bits of runs of numbers, each moved to the right by its shift.

    Args:
      runs: unsigned integers of so many bits as `given`.
      shifts: one for each run; a negative one moves to the left.
      given: bits of the numbers.
      wanted: bits of the result; those above them may be set.
    """
    total = jnp.zeros_like(runs[0])
    for run, right in zip(runs, shifts, strict=True):
        if -wanted < right < given:
            total |= run >> right if right >= 0 else run << -right
    return total


def _runs(x: jax.Array, number: int) -> list[jax.Array]:
    """Equally long parts of the last axis, the last ones padded with zeros."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % number)]
    return jnp.split(jnp.pad(x, pad), number, axis=-1)


def _dtype(width: int):
    return jnp.uint8 if width <= 8 else jnp.uint32


def _group(width: int) -> int:
    """The least number of integers that fill whole bytes."""
    return 8 // math.gcd(width, 8)
