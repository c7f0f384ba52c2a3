"""A few bits an element, so that small numbers are what crosses the link."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _health
from curvadion_jax._payload import Payload
from curvadion_jax.compressors import _base, _codes

# Elements of an array whose codes are made at once. In between arrays are taken apart
# into blocks, which on TPUs is a copy of what is at work and at times two.
_PIECE = 2**22


def quantize(
    bits: int = 8, block: int = 256, *, mean_bits: int | None = None
) -> _base.Compressor:
    r"""Sends codes of 8, 4, 2 or 1 bits with one or two float32 scales a block.

    Every block of `block` consecutive elements of an array is divided by its largest
    absolute value and rounded to :math:`\{-L, \dots, L\}`, L = 127 or 7. With two bits
    an element becomes its sign times one of two magnitudes, the means of the magnitudes
    above and below the block's mean: two scales a block. With one bit it becomes its
    sign times the block's mean magnitude. The mean is taken in two stages, in each of
    which codes and scales of all arrays cross the link in one message (of all arrays
    that are divided alike, where a replica has several devices): each replica
    gets its N-th part of all others' blocks (all-to-all), averages them in float32, and
    sends the codes of the result to all (all-gather). What the second rounding loses is
    charged to the replica that did it, N-fold, so that nothing is lost under error
    feedback.

    Args:
      bits: 8, 4, 2 or 1.
      block: elements that share a scale; at least 2, and their codes fill whole bytes.
      mean_bits: bits of the second stage; None is `bits`. What N replicas lose in the
        first stage is averaged, what is lost of the mean is not: ``quantize(2,
        mean_bits=4)`` loses hardly more than ``quantize(4)``.

    Returns:
      The compressor. It costs bits / 8 + 4 / block bytes an element (8 / block with two
      bits) of arrays padded to whole blocks; half of that for each stage. Not counted
      are the up to N - 1 blocks that make the number of all blocks a multiple of N.

    Raises:
      TypeError: if an argument is not an int.
      ValueError: for other bits, or a block that is odd or below 2, or whose codes do
        not fill whole bytes.

    Example:
      >>> quantize(8).payload({"w": jnp.ones((64, 64))}, {})  # float32: 16384
      Payload(averaged=4160, gathered=0)
    """
    mean_bits = bits if mean_bits is None else mean_bits
    for name, value in (("bits", bits), ("block", block), ("mean_bits", mean_bits)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    for name, value in (("bits", bits), ("mean_bits", mean_bits)):
        if value not in _codes.BITS:
            raise ValueError(f"{name} must be 8, 4, 2 or 1, got {value}")
    if block < 2 or block % 2:
        raise ValueError(f"block must be even and at least 2, got {block}")
    fewest = min(bits, mean_bits)
    if block * fewest % 8:
        raise ValueError(
            f"with {fewest} bits block must be a multiple of {8 // fewest}, got {block}"
        )

    def average(tree, state, group, views):
        del views
        if group.size == 1:
            return _base.alone(group, tree, state)
        tree = jax.tree.map(_base.wide, tree)
        pairs = group.by_device(
            lambda group, parts: _average(parts, (bits, mean_bits), block, group), tree
        )
        mean, unsent = _base.unzip(jax.tree.structure(tree), pairs)
        return _base.Averaged(mean, unsent, state)

    def payload(tree, views):
        del views
        blocks = sum(_blocks(x, block) for x in jax.tree.leaves(tree))
        stages = [_codes.encoded_bytes(blocks, block, b) for b in (bits, mean_bits)]
        return Payload(averaged=sum(stages) // 2)

    return _base.Compressor(lambda params, views: (), average, payload)


def _blocks(x, block: int) -> int:
    return math.ceil(x.size / block)


def _average(leaves: list[jax.Array], stages: tuple[int, int], block: int, group):
    """For every array the mean over replicas, and what this one did not put in."""
    filled = [_Pieces(leaf, block) for leaf in leaves if leaf.size]
    found = iter(_average_filled(filled, stages, block, group) if filled else ())
    return [next(found) if leaf.size else (leaf, leaf) for leaf in leaves]


def _average_filled(arrays: list["_Pieces"], stages, block, group):
    number, (bits, mean_bits) = group.size, stages
    ends = list(itertools.accumulate(_blocks(x.array, block) for x in arrays))
    rows = [x.to_rows(lambda blocks: _to_rows(blocks, bits)) for x in arrays]
    padded = jnp.pad(jnp.concatenate(rows), [(0, -ends[-1] % number), (0, 0)])
    received = group.all_to_all(padded.reshape(number, -1, padded.shape[-1]))
    weights = group.weights[:, None, None]
    weighted = weights * _from_rows(received, block, bits)
    mine = jnp.sum(jnp.where(weights > 0, weighted, 0), 0) / group.total
    mean_rows = _to_rows(mine, mean_bits)
    # What rounding the mean loses, in what this replica would have to put in for it.
    share = _base.own_weight(group) / group.total
    lost = (mine - _from_rows(mean_rows, block, mean_bits)) / share
    gathered = group.all_gather(mean_rows)
    mean = jnp.split(gathered.reshape(-1, gathered.shape[-1]), ends)[:-1]

    def put_in(rows, first):
        """The blocks that rows of this replica stand for, less what it is charged."""
        blocks = _health.or_zeros(group.present, _from_rows(rows, block, bits))
        return blocks - _window(lost, first - group.replica * len(lost), len(rows))

    starts = [0, *ends[:-1]]
    return [
        (
            x.from_rows(of_mean, lambda rows: _from_rows(rows, block, mean_bits)),
            x.less(own, start, put_in),
        )
        for x, of_mean, own, start in zip(arrays, mean, rows, starts, strict=True)
    ]


def _window(rows: jax.Array, first: jax.Array, number: int) -> jax.Array:
    """Rows from the first on, zeros where there are none."""
    padded = jnp.pad(rows, [(number, number), (0, 0)])
    start = jnp.clip(first + number, 0, len(rows) + number)
    return jax.lax.dynamic_slice_in_dim(padded, start, number)


class _Pieces:
    """An array in equal pieces, of whole rows and blocks, one after the other.

    So that what is computed on the way is as large as a piece, not as the array; in one
    piece if it is small, or does not divide.

    Attributes:
      array: the array, not empty.
      block: elements of a block.
      number: number of pieces.
      shape: shape of a piece.
    """

    def __init__(self, array: jax.Array, block: int) -> None:
        self.array, self.block = array, block
        self.number, self.shape = 1, array.shape
        wanted = math.ceil(array.size / _PIECE)
        if array.ndim < 2 or wanted == 1:
            return
        columns = array.shape[-1]
        rows = array.size // columns
        # TPUs keep eight rows together.
        for number in range(wanted, rows // 8 + 1):
            if rows % (8 * number) == 0 and array.size // number % block == 0:
                self.number, self.shape = number, (rows // number, columns)
                return

    def to_rows(self, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Rows of bytes, of blocks [blocks, block] that the array is made of."""

        def of(piece):
            return function(_in_blocks(piece, self.block))

        if self.number == 1:
            return of(self.array)
        rows = jax.lax.map(of, self._cut(self.array))
        return rows.reshape(-1, rows.shape[-1])

    def from_rows(
        self, rows: jax.Array, function: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """An array like this one, of the blocks that rows of bytes stand for."""

        def of(rows):
            return self._piece(function(rows))

        if self.number == 1:
            return of(rows)
        pieces = jax.lax.map(of, rows.reshape(self.number, -1, rows.shape[-1]))
        return pieces.reshape(self.array.shape)

    def less(
        self,
        rows: jax.Array,
        start: int,
        function: Callable[[jax.Array, Any], jax.Array],
    ) -> jax.Array:
        """The array less the blocks of (rows, number of the first of them), or zero.

        It is written over the array where nothing else needs that.
        """

        def of(piece, rows, first):
            return _health.finite_elements(piece - self._piece(function(rows, first)))

        if self.number == 1:
            return of(self.array, rows, start)
        rows = rows.reshape(self.number, -1, rows.shape[-1])

        def one(index, pieces):
            first = start + index * rows.shape[1]
            return pieces.at[index].set(of(pieces[index], rows[index], first))

        pieces = jax.lax.fori_loop(0, self.number, one, self._cut(self.array))
        return pieces.reshape(self.array.shape)

    def _cut(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.number, *self.shape)

    def _piece(self, blocks: jax.Array) -> jax.Array:
        return blocks.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """The elements of an array [blocks, block], the last ones zero."""
    return jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)


def _to_rows(blocks: jax.Array, bits: int) -> jax.Array:
    """Codes and, behind them, scales of blocks [..., block]: uint8[..., bytes]."""
    codes, scales = _codes.encode(blocks, bits)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    words = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    return jnp.concatenate([codes, _codes.pack(words, 32)], axis=-1)


def _from_rows(rows: jax.Array, block: int, bits: int) -> jax.Array:
    """What the rows of `_to_rows` stand for, float32[..., block]."""
    end = _codes.packed_bytes(block, bits)
    packed = rows[..., end:]
    words = _codes.unpack(packed, 32, packed.shape[-1] // 4)
    scales = jax.lax.bitcast_convert_type(words, jnp.float32)
    codes = rows[..., :end]
    if bits == 8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.int8)
    return _codes.decode(codes, scales, block, bits)
