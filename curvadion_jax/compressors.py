"""Compressors decide in what form replicas send arrays that they average.

A compressor replaces a mean by an approximation that costs fewer bytes. It also returns
the part of each replica's arrays that is missing from the mean (`unsent`), so that
``mean == group.mean(tree - unsent)``. A caller that adds it to the next arrays (error
feedback) delays information and drops none but what it rounds where it keeps it; the
delay may still raise the loss.

A synchronizer multiplies by weights first, and zeros whatever takes no part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _arguments
from curvadion_jax._buckets import count_blocks, in_pieces, make_buckets
from curvadion_jax._dtypes import (
    add_cast,
    at_least_float32,
    cast_like,
    compute_dtype,
)
from curvadion_jax.mesh import _within_replica
from curvadion_jax.mesh._group import Group
from curvadion_jax.mesh._layout import Layout

__all__ = ["Averaged", "Codec", "Compressor", "Payload", "exact", "quantize"]


class Payload(NamedTuple):
    """Bytes of one sync.

    Attributes:
      averaged: bytes that cost as an all-reduce of that size: one of N replicas sends
        2 (N - 1) / N times as many. An all-to-all and an all-gather of them together
        cost as much.
      gathered: bytes in all-gathers, of each replica. It sends N - 1 times as many.
    """

    averaged: int = 0
    gathered: int = 0

    def as_averaged(self, replicas: int) -> float:
        """The size of an all-reduce that would cost each replica the same bytes."""
        return self.averaged + self.gathered * replicas / 2


class Averaged(NamedTuple):
    """A compressed mean.

    Attributes:
      mean: the approximate means, in at least float32; the same on all replicas.
      unsent: tree of what this replica did not contribute, of the same shapes, in at
        least float32. Elements that would not be finite are zero: NaN would stay in
        error feedback for good.
    """

    mean: Any
    unsent: Any


class Codec(NamedTuple):
    """Encodes one replica's contribution, for others to decode at any time.

    In `curvadion_jax.sites` each site writes its contribution once, and all read it.

    Attributes:
      encode: (tree of arrays) -> message, a tree of arrays.
      decode: (message, tree of arrays or shapes) -> the tree, in at least float32.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


class Compressor(NamedTuple):
    """Averages trees of arrays in a form of its own.

    Attributes:
      average: (tree, group) -> :class:`Averaged`. `group` is a
        :class:`curvadion_jax.synchronizers.Group`. Synchronizers call it, and
        `payload`, by device: with lists of the parts that one device holds.
      payload: tree -> :class:`Payload`, the bytes of one mean, from shapes alone.
      codec: :class:`Codec` for contributions that are decoded one by one, or None.
      of_replicas: (payload, N) -> the payload of a mean over N replicas, should it
        depend on N, as where replicas divide the arrays among them.

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
    of_replicas: Callable[[Payload, int], Payload] = lambda payload, replicas: payload

    def mean_with_feedback(
        self, contribution: Any, residual: Any, group: Group
    ) -> tuple[Any, Any]:
        """The mean of contributions and residuals, and this replica's new residual.

        Weights are in the contributions already (`Part.weighted`). Each device of a
        replica averages its own parts of the arrays. So blocks are cut out of what one
        device holds, and nothing moves inside of a replica. What several devices hold
        is sent in pieces, once.
        """
        whole = jax.tree.map(add_cast, contribution, residual)
        if not jax.tree.leaves(whole):
            return whole, residual
        if group.size == 1 or not group.layout.is_divided:
            found = self.average(whole, group)
        else:
            of_parts = lambda parts: self.average(parts, Group(group.axis_name))
            found = _within_replica.by_device(of_parts, whole, group.layout)
        # In the structure of the tree: `average` may return the lists that it is given.
        structure = jax.tree.structure(whole)
        mean, unsent = (structure.unflatten(jax.tree.leaves(x)) for x in found)
        return cast_like(mean, whole), cast_like(unsent, residual)

    def average_rows(self, rows: Any, residual: Any) -> Averaged:
        """The mean of stacked rows, as a sync computes it; it needs no mesh.

        For outer steps that are functions of pseudo-gradients [N, ...], as MaxText's.
        Of a program over several devices the compiler decides what is sent.

        Args:
          rows: tree of arrays [N, ...], one row per replica.
          residual: tree of the same shapes: what was unsent before, at first zeros.

        Returns:
          Means of shape [...], and what each row has not contributed, [N, ...].

        Example:
          >>> rows = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
          >>> zeros = jax.tree.map(jnp.zeros_like, rows)
          >>> mean, unsent = exact().average_rows(rows, zeros)
          >>> mean["w"].tolist(), unsent["w"].tolist()
          ([2.0, 3.0], [[0.0, 0.0], [0.0, 0.0]])
        """

        def of_row(row, residual):
            return self.average(jax.tree.map(add_cast, row, residual), Group("row"))

        mean, unsent = jax.vmap(of_row, axis_name="row")(rows, residual)
        return Averaged(jax.tree.map(lambda x: x[0], mean), unsent)

    def payload_by_device(self, tree: Any, layout: Layout) -> Payload:
        """The bytes of `mean_with_feedback`, of all devices of a replica."""
        payloads = [
            self.of_replicas(self.payload(given), layout.replicas)
            for given in _within_replica.calls(tree, layout)
        ]
        return Payload(
            averaged=layout.devices * sum(each.averaged for each in payloads),
            gathered=layout.devices * sum(each.gathered for each in payloads),
        )


def residual_of(
    compressor: Compressor | None, dtype: jax.typing.DTypeLike | None = None
) -> Callable[[Any], Any]:
    """A synchronizer's `init_residual`: zeros like the parameters, or () for None.

    The optimizer keeps them as `state.rows.residual`: what a sync did not send is there
    until the next one (:meth:`Compressor.mean_with_feedback`).
    """

    def init(params):
        if compressor is None:
            return ()
        zeros = lambda x: jnp.zeros_like(x, dtype or compute_dtype(x.dtype))
        return jax.tree.map(zeros, params)

    return init


def exact() -> Compressor:
    """Sends everything, in at least float32.

    Synchronizers without a compressor send as much through `Group.mean`, and take only
    the number of bytes from here.

    Returns:
      The compressor. A mean costs an all-reduce of all arrays and leaves nothing
      unsent, so error feedback has nothing to add.

    Example:
      >>> exact().payload({"w": jnp.ones((64, 64))})  # 4 bytes per element
      Payload(averaged=16384, gathered=0)
    """

    def average(tree, group):
        tree = jax.tree.map(at_least_float32, tree)
        return Averaged(group.mean(tree), jax.tree.map(jnp.zeros_like, tree))

    def payload(tree):
        leaves = jax.tree.leaves(tree)
        sizes = (x.size * compute_dtype(x.dtype).itemsize for x in leaves)
        return Payload(averaged=sum(sizes))

    codec = Codec(
        lambda tree: jax.tree.map(at_least_float32, tree), lambda message, like: message
    )
    return Compressor(average, payload, codec)


def quantize(bits: int = 8, block: int = 256) -> Compressor:
    r"""Sends codes of 8, 4, 2 or 1 bits with one or two float32 scales per block.

    With 8 and 4 bits a block of consecutive elements is divided by its largest absolute
    value and rounded to :math:`\{-L, \dots, L\}`, L = 127 or 7. With two bits an
    element becomes its sign times one of two magnitudes, the means of the magnitudes
    above and below the block's mean; with one bit, times the block's mean magnitude.
    Neither can encode 0: zeros in a block with other elements become nonzero.

    The mean is taken in two stages, each with one message for all arrays. Each replica
    averages an N-th part of all blocks (all-to-all) and sends the codes of the result
    to all (all-gather). The loss of the second rounding is charged to the replica that
    rounded, N-fold, so error feedback covers it. Two replicas exchange their codes
    in one stage: that is as many bytes, and nothing is rounded twice.

    Args:
      bits: 8, 4, 2 or 1.
      block: number of elements that share a scale; their codes must fill whole bytes.

    Returns:
      The compressor. It costs bits / 8 + 4 / block bytes per element (8 / block with
      two bits), half of that for each of two stages. The last block of an array is
      filled by repeating its elements. Blocks are padded to a multiple of N, of more
      than two replicas.

    Raises:
      TypeError: if `bits` is traced, or `block` is not a Python int.
      ValueError: if `bits` is none of these, or the codes of a block fill no bytes.

    Example:
      >>> quantize(8).payload({"w": jnp.ones((64, 64))})  # float32: 16384
      Payload(averaged=4160, gathered=0)

    References:
      Lloyd, `Least squares quantization in PCM
      <https://doi.org/10.1109/TIT.1982.1056489>`_, 1982, for two bits

      Bernstein et al., `signSGD <https://arxiv.org/abs/1802.04434>`_, 2018, for one
    """
    _arguments.check_static(bits, "bits")
    if not isinstance(bits, int | np.integer) or bits not in (8, 4, 2, 1):
        raise ValueError(f"bits is {bits!r}. Give the int 8, 4, 2 or 1.")
    _arguments.check_int(block, "block")
    if block * bits % 8:
        raise ValueError(
            f"block is {block}, and codes of {bits} bits would not fill bytes. Give a "
            f"multiple of {8 // bits}."
        )

    def payload(tree):
        blocks = sum(count_blocks(x, block) for x in jax.tree.leaves(tree))
        return Payload(averaged=blocks * _encoded_bytes(block, bits))

    def of_replicas(payload, replicas):
        # Of more than two each averages as many blocks as any other.
        unit = replicas * _encoded_bytes(block, bits) if replicas > 2 else 1
        return Payload(averaged=math.ceil(payload.averaged / unit) * unit)

    codec = Codec(
        functools.partial(_encode, bits=bits, block=block),
        functools.partial(_decode, bits=bits, block=block),
    )
    average = functools.partial(_average, bits=bits, block=block)
    return Compressor(average, payload, codec, of_replicas)


def _average(tree: Any, group: Group, *, bits: int, block: int) -> Averaged:
    """The mean in codes, as `quantize` describes it.

    The blocks are encoded. Replicas exchange codes: two send each other all of theirs,
    more of them average a part each, encode the mean again, and send that to all. Then
    the mean is decoded, and what a replica's codes have brought to it is subtracted
    from what it wanted to send.
    """
    tree = jax.tree.map(at_least_float32, tree)
    leaves, structure = jax.tree.flatten(tree)
    if group.size == 1 or not leaves:
        return Averaged(tree, jax.tree.map(jnp.zeros_like, tree))
    buckets = make_buckets(leaves, block)
    encode = functools.partial(_encode_blocks, bits=bits)
    decode = functools.partial(_decode_blocks, block=block, bits=bits)
    encoded = jnp.concatenate([bucket.encode(encode) for bucket in buckets])
    if group.size == 2:
        # Each sends its blocks to the other one, and nothing is rounded twice.
        # [blocks, 2 bytes]: the codes of one and of the other.
        received = jnp.concatenate(group.all_gather(encoded), axis=-1)

        def decode_mean(encoded: jax.Array) -> jax.Array:
            one, other = jnp.split(encoded, 2, axis=-1)
            return (decode(one) + decode(other)) / 2

        lost, first_own = None, 0
    else:
        most = max(1, *(bucket.most_blocks for bucket in buckets))
        received, lost = _average_in_parts(encoded, group, encode, decode, most)
        decode_mean, first_own = decode, group.replica * len(lost)
        lost = jnp.pad(lost, [(0, max(0, most - len(lost))), (0, 0)])  # for `_window`

    def sent(encoded, first_block):
        """This replica's to the mean of these blocks, without what its own lost."""
        if lost is None:
            return decode(encoded)
        own_lost = _window(lost, first_block - first_own, len(encoded))
        return decode(encoded) - own_lost

    means = [x for bucket in buckets for x in bucket.decode(received, decode_mean)]
    unsent = [x for bucket in buckets for x in bucket.subtract(encoded, sent)]
    return Averaged(structure.unflatten(means), structure.unflatten(unsent))


def _average_in_parts(encoded, group, encode, decode, most):
    """Each of N replicas averages n blocks of all, and sends their mean to all.

    No more than `most` blocks are decoded at once. Of the decoded blocks only what the
    second rounding lost is kept, n blocks once: memory does not grow with the replicas.

    Args:
      encoded: this replica's blocks, uint8[blocks, bytes].

    Returns:
      The encoded mean of all blocks, and what the n that this replica averaged lost in
      their second rounding, as a contribution of this replica alone.
    """
    replicas = group.size
    padded = jnp.pad(encoded, [(0, -len(encoded) % replicas), (0, 0)])  # [N * n, bytes]
    parts = padded.reshape(replicas, -1, encoded.shape[-1])
    received = group.all_to_all(parts)  # [N, n, bytes]

    def average_piece(first, count):
        piece = jax.lax.dynamic_slice_in_dim(received, first, count, axis=1)
        own_mean = jnp.sum(decode(piece), 0) / replicas  # [count, block]
        own_encoded = encode(own_mean)  # [count, bytes]
        return own_encoded, (own_mean - decode(own_encoded)) * replicas

    pieces, last = divmod(parts.shape[1], most)
    own_encoded, lost = in_pieces(average_piece, pieces, most, last)
    encoded_mean = group.all_gather(own_encoded).reshape(-1, own_encoded.shape[-1])
    return encoded_mean, lost


def _window(x: jax.Array, start: Any, count: int) -> jax.Array:
    """Rows start to start + count, with zeros for those that the table lacks.

    It has `count` rows or more.

    Example:
      >>> x = jnp.array([[1], [2], [3], [4]])
      >>> [_window(x, start, 2).ravel().tolist() for start in (-3, -1, 1, 3, 5)]
      [[0, 0], [0, 1], [2, 3], [4, 0], [0, 0]]
    """
    inside = jnp.clip(start, 0, len(x) - count)
    piece = jax.lax.dynamic_slice_in_dim(x, inside, count)
    surrounded = jnp.pad(piece, [(count, count), (0, 0)])
    place = jnp.clip(count + start - inside, 0, 2 * count)
    return jax.lax.dynamic_slice_in_dim(surrounded, place, count)


def _encode(tree: Any, bits: int, block: int) -> jax.Array:
    """The encoded blocks of all arrays, uint8[blocks, bytes]."""
    buckets = make_buckets([at_least_float32(x) for x in jax.tree.leaves(tree)], block)
    encode = functools.partial(_encode_blocks, bits=bits)
    nothing = jnp.zeros((0, _encoded_bytes(block, bits)), jnp.uint8)
    return jnp.concatenate([nothing, *(bucket.encode(encode) for bucket in buckets)])


def _decode(encoded: jax.Array, like: Any, bits: int, block: int) -> Any:
    """The inverse of `_encode`, for a tree of arrays or their shapes."""
    leaves, structure = jax.tree.flatten(like)
    zeros = [jnp.zeros(x.shape, compute_dtype(x.dtype)) for x in leaves]
    decode = functools.partial(_decode_blocks, block=block, bits=bits)
    buckets = make_buckets(zeros, block)
    return structure.unflatten(
        [x for bucket in buckets for x in bucket.decode(encoded, decode)]
    )


# A code is a multiple of a fraction of its block's largest absolute value (8 and 4
# bits), or a sign and one of its block's two magnitudes (2 bits) or its one magnitude
# (1 bit). An encoded block has its codes and, after them, the bytes of its scales.

# Blocks whose arrays fit together into the cache of a processor's core.
_FEW_BLOCKS = 128


def _encoded_bytes(block: int, bits: int) -> int:
    return block * bits // 8 + 4 * (2 if bits == 2 else 1)


def _encode_blocks(blocks: jax.Array, bits: int) -> jax.Array:
    """Encodes blocks [n, block] of at least float32 as uint8[n, bytes].

    A block that is not finite becomes NaN when it is decoded. Codes of one and two bits
    take several passes over a block. So a CPU encodes a few at a time, whose arrays
    stay in a core's cache. (An accelerator would have too few elements to work on.)
    """
    encode = functools.partial(_encode_few, bits=bits)
    if bits > 2 or len(blocks) <= _FEW_BLOCKS:
        return encode(blocks)

    def by_few(blocks):
        return jax.lax.map(encode, blocks, batch_size=_FEW_BLOCKS)

    return jax.lax.platform_dependent(blocks, cpu=by_few, default=encode)


def _encode_few(x: jax.Array, bits: int) -> jax.Array:
    """`_encode_blocks` at once, of blocks [..., block]."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    if bits == 1:
        codes = (x < 0).astype(jnp.uint8)
        units = jnp.where(largest == 0, 1, largest)  # whose sum does not overflow
        scales = largest * jnp.mean(jnp.abs(x) / units, axis=-1, keepdims=True)
    elif bits == 2:
        codes, scales = _two_magnitudes(x, largest)
    else:
        scales = largest / (2 ** (bits - 1) - 1)
        codes = jnp.round(x / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8) & (2**bits - 1)
        # NaN has no code, and a maximum may drop it (the sums above keep it).
        finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
        scales = jnp.where(finite, scales, jnp.nan)
    words = jax.lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.uint32)
    # Four arrays [..., scales]: the lowest byte of every scale first.
    octets = [(words >> shift).astype(jnp.uint8) for shift in (0, 8, 16, 24)]
    return jnp.concatenate([_pack(codes, bits), *octets], axis=-1)


def _two_magnitudes(x: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes of 2 bits [..., block], and two magnitudes [..., 2] of each block.

    Each magnitude is the mean of those that it replaces (Lloyd's condition for the
    least squared error), so a block's error is smaller than the block. With multiples
    of the largest value it need not be, if one element is large.
    """
    # In units of the largest, so that no sum overflows.
    size = jnp.abs(x) / jnp.where(largest == 0, 1, largest)
    is_large = size > jnp.mean(size, axis=-1, keepdims=True)
    count = jnp.sum(is_large, axis=-1, keepdims=True, dtype=size.dtype)
    means = [
        jnp.sum(jnp.where(chosen, size, 0), axis=-1, keepdims=True)
        / jnp.maximum(number, 1)
        for chosen, number in ((~is_large, x.shape[-1] - count), (is_large, count))
    ]
    codes = is_large.astype(jnp.uint8) + 2 * (x < 0).astype(jnp.uint8)
    return codes, jnp.concatenate(means, axis=-1) * largest


def _decode_blocks(encoded: jax.Array, block: int, bits: int) -> jax.Array:
    """Decodes uint8[..., bytes] to blocks float32[..., block]."""
    codes, octets = jnp.split(encoded, [block * bits // 8], axis=-1)
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
    """Packs codes uint8[..., n] below 2^bits into bytes uint8[..., n * bits / 8].

    The codes of a byte come from equally long runs of the last axis. Neighbours would
    make an axis as short as a byte has codes, and TPUs pad the last axis to 128.
    """
    runs = jnp.split(codes, 8 // bits, axis=-1)
    shifted = [run << index * bits for index, run in enumerate(runs)]
    return functools.reduce(jnp.bitwise_or, shifted)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse of `_pack`."""
    runs = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(runs, axis=-1)
