"""The largest elements alone, and where they stand."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _finite
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._payload import Payload
from curvadion_jax.compressors import _base, _codes

# Positions are int32, as `lax.top_k` gives them.
_LARGEST_BLOCK = 2**31


def top_k(
    fraction: float, bits: int | None = None, block: int | None = 4096
) -> _base.Compressor:
    r"""Sends the elements of largest absolute value and their positions.

    An array is cut into the least number of equal blocks of at most `block` consecutive
    elements. Of each, the ceil(fraction x size) largest are sent to all (all-gather);
    each replica adds up those of all replicas at their positions and divides by their
    number N. The first of equals is taken; NaN counts as infinite, so it is sent.

    A position in a block of n elements takes :math:`\lceil\log_2 n\rceil` bits, 12 with
    4096. Where all elements of a block are kept, nothing but values is sent.

    Args:
      fraction: share of the elements to send, in (0, 1].
      bits: 8, 4, 2 or 1 for values in so many bits, as in :func:`quantize` with the
        kept values of a block as its block; None sends them in at least float32.
      block: most elements of a block; None makes one of each array.

    Returns:
      The compressor. What it costs grows with N, as the kept values and positions are
      sent to all N - 1 others. With 1/32, 2 bits and blocks of 4096 that is 7/16 of a
      bit an element to each of them, and 1/64 for the scales.

    Raises:
      TypeError: if an argument is not a number of the right kind.
      ValueError: for a fraction outside (0, 1], other bits, or a block below 1.

    .. warning::
      Only with error feedback, as in `reconcile` and `average_gradients`, is what it
      leaves out sent in the end. With more than 1.4 / fraction replicas values in
      float32 cost more than an all-reduce of everything.

    Example:
      >>> compressor = top_k(1 / 32, bits=2)  # 128 of 2 + 12 bits, and two scales
      >>> compressor.payload({"w": jnp.ones((64, 64))}, {})
      Payload(averaged=0, gathered=232)

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025

      Peng et al., `DeMo <https://arxiv.org/abs/2411.19870>`_, 2024
    """
    _check_arguments(fraction, bits, block)

    def average(tree, state, group, views):
        del views
        if group.size == 1:
            return _base.Averaged(tree, _base.nothing(tree), state)
        tree = jax.tree.map(_base.wide, tree)

        def of_parts(group, leaves):
            cuts = [_cut(leaf.size, fraction, block) for leaf in leaves]
            messages = [
                _message(x, cut, bits) for x, cut in zip(leaves, cuts, strict=True)
            ]
            gathered = group.all_gather(messages)
            return [
                (_mean(all_, cut, bits, x), _unsent(own, cut, bits, x))
                for all_, own, cut, x in zip(
                    gathered, messages, cuts, leaves, strict=True
                )
            ]

        pairs = group.by_device(of_parts, tree)
        mean, unsent = _base.unzip(jax.tree.structure(tree), pairs)
        return _base.Averaged(mean, unsent, state)

    def payload(tree, views):
        del views
        cuts = [(x, _cut(x.size, fraction, block)) for x in jax.tree.leaves(tree)]
        return Payload(gathered=sum(_message_bytes(x, cut, bits) for x, cut in cuts))

    def encode(tree):
        leaves = [_base.wide(x) for x in jax.tree.leaves(tree)]
        return [_message(x, _cut(x.size, fraction, block), bits) for x in leaves]

    def decode(messages, like):
        leaves, structure = jax.tree.flatten(like)
        found = []
        for message, x in zip(messages, leaves, strict=True):
            cut = _cut(x.size, fraction, block)
            zeros = jnp.zeros((cut.blocks, cut.size), compute_dtype(x.dtype))
            found.append(_uncut(_add(zeros, message, cut, bits), x))
        return jax.tree.unflatten(structure, found)

    posted = _base.Posted(encode, decode)
    return _base.Compressor(lambda params, views: (), average, payload, posted=posted)


def _check_arguments(fraction, bits, block) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"fraction must be a number in (0, 1], got {fraction!r}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int)):
        raise TypeError(f"bits must be an int or None, got {bits!r}")
    if bits is not None and bits not in _codes.BITS:
        raise ValueError(f"bits must be 8, 4, 2, 1 or None, got {bits}")
    if block is not None and (isinstance(block, bool) or not isinstance(block, int)):
        raise TypeError(f"block must be an int or None, got {block!r}")
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1, got {block}")


class _Cut(NamedTuple):
    """How an array is cut: blocks of `size` elements, of which `kept` are sent."""

    blocks: int
    size: int
    kept: int

    @property
    def width(self) -> int:
        """Bits of a position; none where all are sent in their order."""
        return 0 if self.kept == self.size else (self.size - 1).bit_length()


def _cut(size: int, fraction: float, block: int | None) -> _Cut:
    if size == 0:
        return _Cut(0, 0, 0)
    block = min(size, _LARGEST_BLOCK) if block is None else block
    blocks = math.ceil(size / block)
    length = math.ceil(size / blocks)
    # 0.07 * 100 is 7.000000000000001 in floating point, and means 7.
    return _Cut(blocks, length, max(1, math.ceil(fraction * length * (1 - 1e-15))))


def _message(x: jax.Array, cut: _Cut, bits: int | None) -> dict[str, Any]:
    """What a replica sends of an array."""
    parts = jnp.pad(x.reshape(-1), (0, cut.blocks * cut.size - x.size))
    values, message = parts.reshape(cut.blocks, cut.size), {}
    if cut.width:
        size = jnp.where(jnp.isnan(values), jnp.inf, jnp.abs(values))
        _, positions = lax.top_k(size, cut.kept)
        values = jnp.take_along_axis(values, positions, axis=-1)
        message["positions"] = _codes.pack(positions.reshape(-1), cut.width)
    if bits is None or not x.size:
        return message | {"values": values}
    codes, scales = _codes.encode(values, bits)
    return message | {"codes": codes, "scales": scales}


def _message_bytes(x, cut: _Cut, bits: int | None) -> int:
    positions = _codes.packed_bytes(cut.blocks * cut.kept, cut.width)
    if bits is None:
        return positions + cut.blocks * cut.kept * compute_dtype(x.dtype).itemsize
    return positions + _codes.encoded_bytes(cut.blocks, cut.kept, bits)


def _add(total: jax.Array, message, cut: _Cut, bits: int | None) -> jax.Array:
    """The blocks with what one replica sent added at its positions."""
    if bits is None or "values" in message:
        values = message["values"]
    else:
        values = _codes.decode(message["codes"], message["scales"], cut.kept, bits)
    values = values.astype(total.dtype)
    if "positions" not in message:
        return total + values
    positions = _codes.unpack(
        message["positions"], cut.width, cut.blocks * cut.kept
    ).reshape(cut.blocks, cut.kept)
    rows = jnp.arange(cut.blocks)[:, None]
    return total.at[rows, positions].add(values, unique_indices=True)


def _unsent(message, cut: _Cut, bits: int | None, x: jax.Array) -> jax.Array:
    """What is left of the array of which one replica sent this."""
    nothing = jnp.zeros((cut.blocks, cut.size), x.dtype)
    return _finite.finite_elements(x - _uncut(_add(nothing, message, cut, bits), x))


def _mean(messages, cut: _Cut, bits: int | None, like: jax.Array) -> jax.Array:
    """The mean of what all replicas sent, in the shape of the array."""
    number = len(jax.tree.leaves(messages)[0])

    def add(total, message):
        return _add(total, message, cut, bits), None

    # One replica after the other: positions of one are distinct, so that the order of
    # the additions is fixed, and their bits are the same on all replicas.
    first, _ = add(
        jnp.zeros((cut.blocks, cut.size), like.dtype),
        jax.tree.map(lambda x: x[0], messages),
    )
    total, _ = lax.scan(add, first, jax.tree.map(lambda x: x[1:], messages))
    return _uncut(total / number, like)


def _uncut(blocks: jax.Array, like: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: like.size].reshape(like.shape)
