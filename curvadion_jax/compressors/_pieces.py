"""Arrays in pieces of bounded size: large ones taken apart, small ones put together."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax import _finite

# Elements of an array whose codes are made at once. In between arrays are taken apart
# into blocks, which on TPUs is a copy of what is at work and at times two.
PIECE = 2**22


def count_blocks(x: Any, block: int) -> int:
    """Blocks of so many elements that an array takes."""
    return math.ceil(x.size / block)


class Bucket(NamedTuple):
    """Arrays of a dtype that are worked on as one, each from a new block on.

    So a program grows with the number of elements, and not with that of arrays.
    """

    arrays: Sequence[jax.Array]
    block: int

    def joined(self) -> jax.Array:
        """The array, or the blocks of several [blocks, block]."""
        if len(self.arrays) == 1:
            return self.arrays[0]
        return jnp.concatenate([in_blocks(x, self.block) for x in self.arrays])

    def split(self, joined: jax.Array) -> list[jax.Array]:
        """Arrays like those of the bucket."""
        if len(self.arrays) == 1:
            return [joined]
        ends = itertools.accumulate(count_blocks(x, self.block) for x in self.arrays)
        parts = jnp.split(joined, list(ends)[:-1])
        return [_like(part, x) for part, x in zip(parts, self.arrays, strict=True)]


def buckets(arrays: Sequence[jax.Array], block: int) -> list[Bucket]:
    """Neighbours of a dtype together, as long as they are no larger than a piece."""
    found: list[list[jax.Array]] = []
    size = 0
    for x in arrays:
        fits = found and found[-1][-1].dtype == x.dtype and size + x.size <= PIECE
        if fits:
            found[-1].append(x)
            size += x.size
        else:
            found.append([x])
            size = x.size
    return [Bucket(some, block) for some in found]


class Pieces:
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
        self.height = max(PIECE // (self.columns * unit), 1) * unit
        self.count = rows // self.height if array.size > PIECE else 0
        self.rest = rows - self.count * self.height

    def to_rows(self, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Rows of bytes, of blocks [blocks, block] that the array is made of."""
        return self._each(
            lambda index, height: function(
                in_blocks(self._piece(self.table, index, height), self.block)
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


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """The elements of an array [blocks, block].

    The last ones stand there once more to fill their block, whose scales zeros would
    make smaller.
    """
    x = x.reshape(-1)
    if last := x.size % block:
        x = jnp.concatenate([x, jnp.resize(x[-last:], (block - last,))])
    return x.reshape(-1, block)


def _like(blocks: jax.Array, piece: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: piece.size].reshape(piece.shape)
