"""A few bits an element, so that small numbers are what crosses the link."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _arguments
from curvadion_jax._payload import Payload
from curvadion_jax.compressors import _base, _codes, _pieces
from curvadion_jax.compressors._pieces import Pieces


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
    feedback, whatever the replicas' weights are at the next sync. Two replicas send
    each other their codes in one stage (all-gather) if both stages have the same bits:
    that is as many bytes, and nothing is rounded twice.

    Args:
      bits: 8, 4, 2 or 1.
      block: elements that share a scale; at least 2, and their codes fill whole bytes.
      mean_bits: bits of the second stage; None is `bits`. What N replicas lose in the
        first stage is averaged, what is lost of the mean is not: ``quantize(2,
        mean_bits=4)`` loses hardly more than ``quantize(4)``. Two replicas gain
        nothing by it.

    Returns:
      The compressor. It costs bits / 8 + 4 / block bytes an element (8 / block with two
      bits) of arrays padded to whole blocks; half of that for each of two stages. Not
      counted are then up to N - 1 blocks that make their number a multiple of N.

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
        _arguments.check_int(value, name)
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
        blocks = sum(_pieces.count_blocks(x, block) for x in jax.tree.leaves(tree))
        stages = [_codes.encoded_bytes(blocks, block, b) for b in (bits, mean_bits)]
        return Payload(averaged=sum(stages) // 2)

    posted = _base.Posted(
        functools.partial(_post, bits=bits, block=block),
        functools.partial(_read_post, bits=bits, block=block),
    )
    return _base.Compressor(lambda params, views: (), average, payload, posted=posted)


def _average(leaves: list[jax.Array], stages: tuple[int, int], block: int, group):
    """For every array the mean over replicas, and what this one did not put in."""
    buckets = _pieces.buckets([leaf for leaf in leaves if leaf.size], block)
    filled = [Pieces(bucket.joined(), block) for bucket in buckets]
    if not filled:
        results = []
    elif group.size == 2 and len(set(stages)) == 1:
        results = _average_of_two(filled, stages[0], block, group)
    else:
        results = _average_filled(filled, stages, block, group)
    pairs = zip(buckets, results, strict=True)
    found = iter(
        [pair for x, both in pairs for pair in zip(*map(x.split, both), strict=True)]
    )
    return [next(found) if leaf.size else (leaf, leaf) for leaf in leaves]


def _average_filled(arrays: list[Pieces], stages, block, group):
    number, (bits, mean_bits) = group.size, stages
    ends = list(
        itertools.accumulate(_pieces.count_blocks(x.array, block) for x in arrays)
    )
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


def _average_of_two(arrays: list[Pieces], bits, block, group):
    rows = [x.to_rows(lambda blocks: _to_rows(blocks, bits)) for x in arrays]
    ends = itertools.accumulate(map(len, rows))
    gathered = group.all_gather(jnp.concatenate(rows))
    of_both = jnp.split(jnp.concatenate(gathered, axis=-1), list(ends)[:-1])

    def read(rows):
        return _from_rows(rows, block, bits)

    def mean(rows):
        one, other = jnp.split(rows, 2, axis=-1)
        return (read(one) + read(other)) / 2

    return [
        (x.from_rows(both, mean), x.less(own, lambda rows, _: read(rows)))
        for x, both, own in zip(arrays, of_both, rows, strict=True)
    ]


def _post(tree: Any, bits: int, block: int) -> jax.Array:
    """The rows of all arrays, uint8[blocks, bytes]."""
    leaves = [_base.wide(x) for x in jax.tree.leaves(tree) if x.size]
    pieces = [Pieces(each.joined(), block) for each in _pieces.buckets(leaves, block)]
    rows = [x.to_rows(lambda blocks: _to_rows(blocks, bits)) for x in pieces]
    width = _codes.encoded_bytes(1, block, bits)
    return jnp.concatenate([jnp.zeros((0, width), jnp.uint8), *rows])


def _read_post(rows: jax.Array, like: Any, bits: int, block: int) -> Any:
    """What rows of `_post` stand for, in a tree like the one that it was given."""
    leaves, structure = jax.tree.flatten(like)
    zeros = [jnp.zeros(x.shape, _base.compute_dtype(x.dtype)) for x in leaves]
    found, first = [], 0
    for bucket in _pieces.buckets([x for x in zeros if x.size], block):
        joined = bucket.joined()
        last = first + _pieces.count_blocks(joined, block)
        blocks = Pieces(joined, block).from_rows(
            rows[first:last], lambda part: _from_rows(part, block, bits)
        )
        found += bucket.split(blocks)
        first = last
    rest = iter(found)
    return jax.tree.unflatten(structure, [next(rest) if x.size else x for x in zeros])


def _window(rows: jax.Array, first: jax.Array, number: int) -> jax.Array:
    """Rows from the first on, zeros where there are none."""
    padded = jnp.pad(rows, [(number, number), (0, 0)])
    start = jnp.clip(first + number, 0, len(rows) + number)
    return jax.lax.dynamic_slice_in_dim(padded, start, number)


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
