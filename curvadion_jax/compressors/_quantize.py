"""A few bits an element, so that small numbers are what crosses the link."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _finite
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
    feedback, whatever the replicas' weights are at the next sync.

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
            return _base.Averaged(tree, _base.nothing(tree), state)
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
    mine = jnp.sum(_from_rows(received, block, bits), 0) / number
    mean_rows = _to_rows(mine, mean_bits)
    # What rounding the mean loses, in what one replica would have to put in for it.
    lost = (mine - _from_rows(mean_rows, block, mean_bits)) * number
    gathered = group.all_gather(mean_rows)
    mean = jnp.split(gathered.reshape(-1, gathered.shape[-1]), ends)[:-1]

    def put_in(start, rows, first):
        """The blocks that rows of this replica stand for, less what it is charged."""
        first = start + first - group.replica * len(lost)
        return _from_rows(rows, block, bits) - _window(lost, first, len(rows))

    starts = [0, *ends[:-1]]
    return [
        (
            x.from_rows(of_mean, lambda rows: _from_rows(rows, block, mean_bits)),
            x.less(own, functools.partial(put_in, start)),
        )
        for x, of_mean, own, start in zip(arrays, mean, rows, starts, strict=True)
    ]


def _window(rows: jax.Array, first: jax.Array, number: int) -> jax.Array:
    """Rows from the first on, zeros where there are none."""
    padded = jnp.pad(rows, [(number, number), (0, 0)])
    start = jnp.clip(first + number, 0, len(rows) + number)
    return jax.lax.dynamic_slice_in_dim(padded, start, number)


class _Pieces:
    """An array as pieces of whole rows and blocks, of which only the last is shorter.

    They are worked on one after the other, so that what is computed on the way is as
    large as a piece, not as the array. A small one is a single piece. Eight rows, or
    rows that fill whole blocks, are never taken apart, however long they are.

    Attributes:
      array: the array, not empty.
      block: elements of a block.
      table: the array as [rows, columns], or [rows] if it has one dimension.
      height: rows of a piece.
      columns: elements of a row.
      count: number of pieces that have so many.
      rest: rows of the piece after them, or 0.
    """

    def __init__(self, array: jax.Array, block: int) -> None:
        self.array, self.block = array, block
        self.table = array.reshape(-1, *array.shape[1:][-1:])
        rows, self.columns = len(self.table), math.prod(self.table.shape[1:])
        # Rows that fill blocks, eight together as TPUs keep them.
        unit = math.lcm(8, block // math.gcd(block, self.columns))
        self.height = max(_PIECE // (self.columns * unit), 1) * unit
        self.count = rows // self.height if array.size > _PIECE else 0
        self.rest = rows - self.count * self.height

    def to_rows(self, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Rows of bytes, of blocks [blocks, block] that the array is made of."""
        return self._each(
            lambda index, height: function(
                _in_blocks(self._piece(self.table, index, height), self.block)
            )
        )

    def from_rows(
        self, rows: jax.Array, function: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """An array like this one, of the blocks that rows of bytes stand for."""

        def piece(index, height):
            given, _ = self._rows(rows, index, height)
            return _like(function(given), self.table[:height])

        return self._each(piece).reshape(self.array.shape)

    def less(
        self, rows: jax.Array, function: Callable[[jax.Array, Any], jax.Array]
    ) -> jax.Array:
        """The array less the blocks of (rows, number of the first), zero if not finite.

        It is written over the array where nothing else needs that.
        """

        def write(index, table, height):
            piece = self._piece(table, index, height)
            new = piece - _like(function(*self._rows(rows, index, height)), piece)
            return jax.lax.dynamic_update_slice_in_dim(
                table, _finite.finite_elements(new), index * self.height, 0
            )

        table = self.table
        if self.count:
            one = functools.partial(write, height=self.height)
            table = jax.lax.fori_loop(0, self.count, one, table)
        if self.rest:
            table = write(self.count, table, self.rest)
        return table.reshape(self.array.shape)

    def _each(self, function: Callable[[Any, int], jax.Array]) -> jax.Array:
        """What function(number of the piece, its height) gives, in one array."""
        parts = []
        if self.count:
            numbers = jnp.arange(self.count)
            found = jax.lax.map(lambda index: function(index, self.height), numbers)
            parts.append(found.reshape(-1, *found.shape[2:]))
        if self.rest:
            parts.append(function(self.count, self.rest))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _piece(self, table: jax.Array, index: Any, height: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(table, index * self.height, height)

    def _rows(self, rows: jax.Array, index: Any, height: int) -> tuple[jax.Array, Any]:
        """A piece's rows of bytes, and the number of the first of them."""
        first = index * (self.height * self.columns // self.block)
        number = math.ceil(height * self.columns / self.block)
        return jax.lax.dynamic_slice_in_dim(rows, first, number), first


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """The elements of an array [blocks, block], the last ones zero."""
    return jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)


def _like(blocks: jax.Array, piece: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: piece.size].reshape(piece.shape)


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
