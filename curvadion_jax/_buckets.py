"""Arrays in pieces of bounded size, for compressors that encode blocks of elements.

Small arrays are put together, and large ones are taken apart. So a program grows with
the number of elements and not of arrays, and the work of encoding stays in a piece.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _finite

# Elements that are encoded at once: on TPUs cutting an array into blocks copies it.
PIECE = 2**22
_take = jax.lax.dynamic_slice_in_dim


def count_blocks(x: Any, block: int) -> int:
    """Number of blocks of an array, the last of which may be padded."""
    return math.ceil(x.size / block)


def make_buckets(arrays: Sequence[jax.Array], block: int) -> list["Bucket"]:
    """Puts neighbours of one dtype together, up to `PIECE` elements."""
    groups: list[list[jax.Array]] = []
    size = 0
    for x in arrays:
        if groups and groups[-1][0].dtype == x.dtype and size + x.size <= PIECE:
            groups[-1].append(x)
            size += x.size
        else:
            groups.append([x])
            size = x.size
    buckets, first_block = [], 0
    for group in groups:
        buckets.append(Bucket(group, block, first_block))
        first_block += sum(count_blocks(x, block) for x in group)
    return buckets


class Bucket:
    """Arrays of one dtype as a table, which is encoded piece by piece.

    A single array keeps its last axis as the table's columns. Of several arrays each
    row is a block. A piece has whole rows and whole blocks, about `PIECE` elements.
    """

    def __init__(self, arrays: Sequence[jax.Array], block: int, first_block: int):
        self.arrays, self.block = arrays, block
        self.first_block = first_block  # Its number among the blocks of all buckets.
        if len(arrays) == 1 and arrays[0].size:
            # The last axis stays, so that elements stay where they are in memory. A
            # vector gets no axis of one column, which TPUs would pad to 128.
            columns = arrays[0].shape[1:][-1:]
            self.table, largest = arrays[0].reshape(-1, *columns), PIECE
        else:
            self.table = jnp.concatenate([_in_blocks(x, block) for x in arrays])
            # At least two pieces, so that there is a loop: without one XLA repeats the
            # work for every array that is cut out of the result.
            largest = min(PIECE, self.table.size // 2)
        rows, self.columns = len(self.table), math.prod(self.table.shape[1:])
        self.piece_rows = _rows_of_piece(self.columns, block, largest)
        # Whole pieces, and the rows of a shorter last one. A small table has just that.
        self.pieces, self.last_rows = 0, rows
        if self.table.size > largest:
            self.pieces, self.last_rows = divmod(rows, self.piece_rows)

    @property
    def most_blocks(self) -> int:
        """The blocks of its largest piece."""
        rows = self.piece_rows if self.pieces else self.last_rows
        return math.ceil(rows * self.columns / self.block)

    def encode(self, encode: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Encodes all blocks, by a function [n, block] -> [n, bytes]."""

        def encode_piece(first_row, rows):
            return encode(_in_blocks(_take(self.table, first_row, rows), self.block))

        return in_pieces(encode_piece, self.pieces, self.piece_rows, self.last_rows)

    def decode(
        self, encoded: jax.Array, decode: Callable[[jax.Array], jax.Array]
    ) -> list[jax.Array]:
        """Decodes the arrays, by a function [n, bytes] -> [n, block].

        `encoded` has the blocks of all buckets.
        """

        def decode_piece(first_row, rows):
            blocks, _ = self._blocks_of(encoded, first_row, rows)
            return _reshaped_like(decode(blocks), self.table[:rows])

        table = in_pieces(decode_piece, self.pieces, self.piece_rows, self.last_rows)
        return self._split(table)

    def subtract(
        self, encoded: jax.Array, sent: Callable[[jax.Array, Any], jax.Array]
    ) -> list[jax.Array]:
        """Subtracts what was sent, and sets to zero what would not be finite.

        `sent` is given encoded blocks and the number of the first of them.
        """

        def subtract_piece(index, table, rows):
            first_row = index * self.piece_rows
            piece = _take(table, first_row, rows)
            blocks, first_block = self._blocks_of(encoded, first_row, rows)
            new = piece - _reshaped_like(sent(blocks, first_block), piece)
            return jax.lax.dynamic_update_slice_in_dim(
                table, _finite.finite_elements(new), first_row, 0
            )

        table = self.table  # The result overwrites it where nothing else needs it.
        if self.pieces:
            whole = functools.partial(subtract_piece, rows=self.piece_rows)
            table = jax.lax.fori_loop(0, self.pieces, whole, table)
        if self.last_rows:
            table = subtract_piece(self.pieces, table, self.last_rows)
        return self._split(table)

    def _blocks_of(
        self, encoded: jax.Array, first_row: Any, rows: int
    ) -> tuple[Any, Any]:
        """A piece's encoded blocks [n, bytes], and the number of the first."""
        blocks_per_piece = self.piece_rows * self.columns // self.block
        first = self.first_block + first_row // self.piece_rows * blocks_per_piece
        count = math.ceil(rows * self.columns / self.block)
        return _take(encoded, first, count), first

    def _split(self, table: jax.Array) -> list[jax.Array]:
        """The arrays that a table like the bucket's is made of."""
        if len(self.arrays) == 1:
            return [table.reshape(self.arrays[0].shape)]
        ends = np.cumsum([count_blocks(x, self.block) for x in self.arrays])
        parts = jnp.split(table, ends[:-1])
        return [_reshaped_like(x, y) for x, y in zip(parts, self.arrays, strict=True)]


def _rows_of_piece(columns: int, block: int, largest: int) -> int:
    """As many rows as fill whole blocks, and `largest` elements or less if they can.

    They come in groups of eight, as TPUs keep them.

    Example:
      >>> [_rows_of_piece(columns, 256, 4096) for columns in (256, 96, 1000)]
      [16, 40, 32]
    """
    unit = math.lcm(8, block // math.gcd(block, columns))
    return max(largest // (columns * unit), 1) * unit


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """The elements of an array, [blocks, block].

    The last ones are repeated to fill their block: zeros would make its scales smaller.
    """
    x = x.reshape(-1)
    if last := x.size % block:
        x = jnp.concatenate([x, jnp.resize(x[-last:], (block - last,))])
    return x.reshape(-1, block)


def _reshaped_like(blocks: jax.Array, piece: jax.Array) -> jax.Array:
    """Blocks [n, block] in the shape of a piece, without what fills the last block."""
    return blocks.reshape(-1)[: piece.size].reshape(piece.shape)


def in_pieces(
    function: Callable[[Any, int], Any], pieces: int, piece_rows: int, last_rows: int
) -> Any:
    """Joins trees of rows, the results of function(first row, number of rows)."""
    parts = []
    if pieces:
        found = jax.lax.map(
            lambda index: function(index * piece_rows, piece_rows), jnp.arange(pieces)
        )  # [pieces, n, ...]
        parts.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found))
    if last_rows or not parts:  # An array may be empty.
        parts.append(function(pieces * piece_rows, last_rows))
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
