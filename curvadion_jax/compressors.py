"""Compressors decide in what form replicas send arrays that they average.

A compressor replaces a mean by an approximate one that costs fewer bytes. It also says
what of its own array each replica did not contribute (`unsent`), so that ``mean ==
group.mean(tree - unsent)``. A caller that adds `unsent` next time (error feedback)
delays information and drops none; the delay may still cost loss.

Compressors know no weights. A synchronizer gives them arrays times their weight, and
zeros for a replica that takes no part.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax import _finite
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import Payload
from curvadion_jax._trees import compute_dtype, wide

__all__ = ["Averaged", "Codec", "Compressor", "Payload", "exact", "quantize"]

# Elements that are encoded at once. Arrays are taken apart into blocks, which on TPUs
# takes a copy of what is being encoded, at times two.
_PIECE = 2**22
_take = jax.lax.dynamic_slice_in_dim


class Averaged(NamedTuple):
    """A compressed mean.

    Attributes:
      mean: tree of the approximate means, like the given tree and at least float32; the
        same on all replicas.
      unsent: tree of what this replica did not contribute, of the same shapes and
        dtypes. Zero in every element that would not be finite, since NaN that is held
        back would be in all that follows. Replica-varying.
    """

    mean: Any
    unsent: Any


class Codec(NamedTuple):
    """A form in which one replica's contribution is read without the others.

    `curvadion_jax.sites` has no second round in which to send means: each site writes
    its contribution once, and all read it.

    Attributes:
      encode: (tree of arrays) -> message, a tree of arrays.
      decode: (message, tree of arrays or their shapes) -> what the message stands for,
        a tree of at least float32.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


class Compressor(NamedTuple):
    """Functions that say in what form a tree of arrays is averaged.

    Attributes:
      average: (tree, group) -> :class:`Averaged`. `group` is a
        :class:`curvadion_jax.synchronizers.Group`.
      payload: tree -> :class:`Payload`, the bytes of one mean, from shapes alone.
      codec: :class:`Codec` for contributions that are read one by one; None where
        replicas must run together.

    Example:
      >>> def average(tree, group):
      ...     sent = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
      ...     gathered = group.all_gather(sent)  # arrays [N, ...]
      ...     mean = jax.tree.map(lambda x: jnp.mean(x, 0, jnp.float32), gathered)
      ...     unsent = jax.tree.map(lambda x, y: jnp.nan_to_num(x - y), tree, sent)
      ...     return Averaged(mean, unsent)
      >>> def payload(tree):
      ...     return Payload(gathered=sum(2 * x.size for x in jax.tree.leaves(tree)))
      >>> rounded = Compressor(average, payload)
      >>> rounded.payload({"w": jnp.ones((32, 16))})
      Payload(averaged=0, gathered=1024)
    """

    average: Callable[[Any, Group], Averaged]
    payload: Callable[[Any], Payload]
    codec: Codec | None = None


def exact() -> Compressor:
    """Everything is sent, in at least float32.

    Example:
      >>> exact().payload({"kernel": jnp.ones((2, 3), jnp.bfloat16)})
      Payload(averaged=24, gathered=0)
    """

    def average(tree, group):
        tree = jax.tree.map(wide, tree)
        return Averaged(group.mean(tree), jax.tree.map(jnp.zeros_like, tree))

    def payload(tree):
        leaves = jax.tree.leaves(tree)
        sizes = (x.size * compute_dtype(x.dtype).itemsize for x in leaves)
        return Payload(averaged=sum(sizes))

    codec = Codec(lambda tree: jax.tree.map(wide, tree), lambda message, like: message)
    return Compressor(average, payload, codec)


def quantize(bits: int = 8, block: int = 256) -> Compressor:
    r"""Sends codes of 8, 4, 2 or 1 bits with one or two float32 scales per block.

    With 8 and 4 bits a block of consecutive elements is divided by its largest absolute
    value and rounded to :math:`\{-L, \dots, L\}`, L = 127 or 7. With two bits an
    element becomes its sign times one of two magnitudes, the means of the magnitudes
    above and below the block's mean; with one bit, times the block's mean magnitude.

    The mean is taken in two stages, each with one message for all arrays. Each replica
    averages an N-th part of all blocks (all-to-all) and sends the codes of the result
    to all (all-gather). The loss of the second rounding is charged to the replica that
    rounded, N-fold, so error feedback covers it. Two replicas exchange their codes
    in one stage: that is as many bytes, and nothing is rounded twice.

    Args:
      bits: 8, 4, 2 or 1.
      block: elements that share a scale; their codes fill whole bytes.

    Returns:
      The compressor. It costs bits / 8 + 4 / block bytes per element (8 / block with
      two bits), half of that for each of two stages. Arrays are padded to whole blocks.

    Raises:
      ValueError: for other bits, or a block whose codes do not fill whole bytes.

    Example:
      >>> quantize(8).payload({"w": jnp.ones((64, 64))})  # float32: 16384
      Payload(averaged=4160, gathered=0)

    References:
      Lloyd, `Least squares quantization in PCM
      <https://doi.org/10.1109/TIT.1982.1056489>`_, 1982, for two bits
    """
    if bits not in (8, 4, 2, 1):
        raise ValueError(f"bits is {bits}. Give 8, 4, 2 or 1.")
    if block < 1 or block * bits % 8:
        raise ValueError(
            f"block is {block}, and codes of {bits} bits would not fill bytes. Give a "
            f"multiple of {8 // bits}."
        )

    def average(tree, group):
        tree = jax.tree.map(wide, tree)
        if group.size == 1:
            return Averaged(tree, jax.tree.map(jnp.zeros_like, tree))
        run = functools.partial(_average, bits=bits, block=block)
        pairs = group.by_device(run, tree)
        parts = ([pair[part] for pair in pairs] for part in (0, 1))
        return Averaged(*map(jax.tree.structure(tree).unflatten, parts))

    def payload(tree):
        blocks = sum(math.ceil(x.size / block) for x in jax.tree.leaves(tree))
        return Payload(averaged=blocks * _row_bytes(block, bits))

    codec = Codec(
        functools.partial(_encode, bits=bits, block=block),
        functools.partial(_decode, bits=bits, block=block),
    )
    return Compressor(average, payload, codec)


def _average(group, leaves, bits: int, block: int):
    """For every array the mean over replicas, and what this one did not contribute."""
    replicas = group.size
    buckets = _buckets(leaves, block)
    if not buckets:
        return []
    read = functools.partial(_from_rows, block=block, bits=bits)
    rows = jnp.concatenate([bucket.to_rows(bits) for bucket in buckets])
    if replicas == 2:
        mean_rows = jnp.concatenate(group.all_gather(rows), axis=-1)

        def read_mean(rows):
            one, other = jnp.split(rows, 2, axis=-1)
            return (read(one) + read(other)) / 2

        def contributed(rows, first):
            del first
            return read(rows)

    else:
        padded = jnp.pad(rows, [(0, -len(rows) % replicas), (0, 0)])
        received = group.all_to_all(padded.reshape(replicas, -1, rows.shape[-1]))
        mine = jnp.sum(read(received), 0) / replicas
        mine_rows = _to_rows(mine, bits)
        mean_rows = group.all_gather(mine_rows).reshape(-1, mine_rows.shape[-1])
        read_mean = read
        # The loss of rounding the mean, as a contribution of this replica alone.
        lost = (mine - read(mine_rows)) * replicas

        def contributed(rows, first):
            # Zeros around it, for rows that other replicas have averaged.
            around = jnp.pad(lost, [(len(rows), len(rows)), (0, 0)])
            start = first - group.replica * len(lost) + len(rows)
            start = jnp.clip(start, 0, len(lost) + len(rows))
            return read(rows) - _take(around, start, len(rows))

    means = [x for bucket in buckets for x in bucket.from_rows(mean_rows, read_mean)]
    unsent = [x for bucket in buckets for x in bucket.minus(rows, contributed)]
    return [*zip(means, unsent, strict=True)]


def _encode(tree: Any, bits: int, block: int) -> jax.Array:
    """The rows of all arrays, uint8[blocks, bytes]."""
    buckets = _buckets([wide(x) for x in jax.tree.leaves(tree)], block)
    return jnp.concatenate([bucket.to_rows(bits) for bucket in buckets])


def _decode(rows: jax.Array, like: Any, bits: int, block: int) -> Any:
    """What rows of `_encode` stand for, in a tree like the one that it was given."""
    leaves, structure = jax.tree.flatten(like)
    zeros = [jnp.zeros(x.shape, compute_dtype(x.dtype)) for x in leaves]
    read = functools.partial(_from_rows, block=block, bits=bits)
    buckets = _buckets(zeros, block)
    return structure.unflatten(
        [x for bucket in buckets for x in bucket.from_rows(rows, read)]
    )


# Codes. A code is a multiple of a fraction of its block's largest absolute value (8 and
# 4 bits), or a sign and one of its block's two magnitudes (2 bits) or its one magnitude
# (1 bit). A row has the codes of a block and, behind them, the bytes of its scales.


def _row_bytes(block: int, bits: int) -> int:
    return block * bits // 8 + 4 * (2 if bits == 2 else 1)


def _to_rows(x: jax.Array, bits: int) -> jax.Array:
    """Rows uint8[..., bytes] of blocks [..., block] of at least float32.

    A block that is not finite has NaN for its scales.
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
    words = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    octets = [(words >> shift).astype(jnp.uint8) for shift in (0, 8, 16, 24)]
    packed = _pack(jax.lax.bitcast_convert_type(codes, jnp.uint8), bits)
    return jnp.concatenate([packed, *octets], axis=-1)


def _two_magnitudes(x: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of 2 bits, and a block's two magnitudes [..., 2].

    Each magnitude is the mean of those that it replaces (Lloyd's condition for the
    least squared error), so a block's error is smaller than the block. With multiples
    of the largest value it need not be, if one element is large.
    """
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


def _from_rows(rows: jax.Array, block: int, bits: int) -> jax.Array:
    """What the rows of `_to_rows` stand for, float32[..., block]."""
    codes, octets = jnp.split(rows, [block * bits // 8], axis=-1)
    octets = jnp.split(octets.astype(jnp.uint32), 4, axis=-1)
    words = sum(octet << 8 * index for index, octet in enumerate(octets))
    scales = jax.lax.bitcast_convert_type(words, jnp.float32)
    codes = jax.lax.bitcast_convert_type(_unpack(codes, bits), jnp.int8)
    if bits == 1:
        return jnp.where(codes > 0, -scales, scales)
    if bits == 2:
        size = jnp.where((codes & 1) > 0, scales[..., 1:], scales[..., :1])
        return jnp.where((codes & 2) > 0, -size, size)
    if bits == 4:
        codes = jnp.where(codes > 7, codes - 16, codes)
    return codes.astype(scales.dtype) * scales


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """The lowest bits of uint8[..., n] without the bits between them.

    The codes of a byte come from equally long runs of the last axis. Neighbours would
    make an axis as short as a byte has codes, and TPUs pad the last axis to 128.
    """
    runs = jnp.split(codes & (2**bits - 1), 8 // bits, axis=-1)
    shifted = [run << index * bits for index, run in enumerate(runs)]
    return functools.reduce(jnp.bitwise_or, shifted)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The codes uint8[..., n] that `_pack` was given."""
    runs = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(runs, axis=-1)


# Pieces: large arrays are taken apart, small ones are put together.


def _buckets(arrays: Sequence[jax.Array], block: int) -> list["_Bucket"]:
    """Neighbours of a dtype together, up to a piece."""
    together: list[list[jax.Array]] = []
    size = 0
    for x in arrays:
        if together and together[-1][0].dtype == x.dtype and size + x.size <= _PIECE:
            together[-1].append(x)
            size += x.size
        else:
            together.append([x])
            size = x.size
    sizes = (sum(math.ceil(x.size / block) for x in some) for some in together)
    pairs = zip(together, itertools.accumulate(sizes, initial=0), strict=False)
    return [_Bucket(some, block, first) for some, first in pairs]


class _Bucket:
    """Arrays of a dtype as one, in pieces of whole rows and blocks.

    Each of several arrays begins a block, so a program grows with the number of
    elements and not of arrays. Pieces are worked on one after the other, so temporary
    memory is as large as a piece. Eight rows, or rows that fill whole blocks, are never
    taken apart, however long they are.
    """

    def __init__(self, arrays: Sequence[jax.Array], block: int, first: int) -> None:
        self.arrays, self.block = arrays, block
        self.first = first  # block among those of all buckets
        joined, piece = arrays[0], _PIECE
        if len(arrays) > 1 or not joined.size:
            joined = jnp.concatenate([_in_blocks(x, block) for x in arrays])
            # Outside of a loop XLA would put the work into the program once for every
            # array that is cut out of the result.
            piece = min(piece, joined.size // 2)
        self.table = joined.reshape(-1, *joined.shape[1:][-1:])
        rows, self.columns = len(self.table), math.prod(self.table.shape[1:])
        # Rows that fill blocks, eight together as TPUs keep them.
        unit = math.lcm(8, block // math.gcd(block, self.columns))
        self.height = max(piece // (self.columns * unit), 1) * unit
        self.count = rows // self.height if joined.size > piece else 0
        self.rest = rows - self.count * self.height  # rows of a last, shorter piece

    def to_rows(self, bits: int) -> jax.Array:
        """The bytes of all blocks."""

        def piece(index, height):
            part = _take(self.table, index * self.height, height)
            return _to_rows(_in_blocks(part, self.block), bits)

        return self._each(piece)

    def from_rows(
        self, rows: jax.Array, read: Callable[[jax.Array], jax.Array]
    ) -> list[jax.Array]:
        """Arrays like the bucket's, of what rows of all buckets stand for."""

        def piece(index, height):
            return _like(read(self._rows(rows, index, height)[0]), self.table[:height])

        return self._split(self._each(piece))

    def minus(
        self, rows: jax.Array, read: Callable[[jax.Array, Any], jax.Array]
    ) -> list[jax.Array]:
        """The arrays less what (rows, number of the first) stand for; finite."""

        def write(index, table, height):
            part = _take(table, index * self.height, height)
            new = part - _like(read(*self._rows(rows, index, height)), part)
            return jax.lax.dynamic_update_slice_in_dim(
                table, _finite.finite_elements(new), index * self.height, 0
            )

        table = self.table  # which the result overwrites where nothing else needs it
        if self.count:
            one = functools.partial(write, height=self.height)
            table = jax.lax.fori_loop(0, self.count, one, table)
        if self.rest:
            table = write(self.count, table, self.rest)
        return self._split(table)

    def _each(self, function: Callable[[Any, int], jax.Array]) -> jax.Array:
        """What function(number of the piece, its height) gives, in one array."""
        parts = []
        if self.count:
            numbers = jnp.arange(self.count)
            found = jax.lax.map(lambda index: function(index, self.height), numbers)
            parts.append(found.reshape(-1, *found.shape[2:]))
        if self.rest or not parts:  # an array may be empty
            parts.append(function(self.count, self.rest))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _rows(self, rows: jax.Array, index: Any, height: int) -> tuple[jax.Array, Any]:
        """A piece's rows of bytes, and the number of the first of them."""
        first = self.first + index * (self.height * self.columns // self.block)
        return _take(rows, first, math.ceil(height * self.columns / self.block)), first

    def _split(self, table: jax.Array) -> list[jax.Array]:
        if len(self.arrays) == 1:
            return [table.reshape(self.arrays[0].shape)]
        sizes = [math.ceil(x.size / self.block) for x in self.arrays]
        parts = jnp.split(table, list(itertools.accumulate(sizes))[:-1])
        return [_like(part, x) for part, x in zip(parts, self.arrays, strict=True)]


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """The elements of an array [blocks, block].

    The last ones are repeated to fill their block: zeros would make its scales smaller.
    """
    x = x.reshape(-1)
    if last := x.size % block:
        x = jnp.concatenate([x, jnp.resize(x[-last:], (block - last,))])
    return x.reshape(-1, block)


def _like(blocks: jax.Array, piece: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: piece.size].reshape(piece.shape)
