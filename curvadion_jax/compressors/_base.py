"""The form in which replicas send something whose mean they want.

A compressor replaces a mean by an approximate one that costs fewer bytes, and says
what of its own array each replica did not put in. The two agree: the mean over the
replicas of what they put in *is* the mean that all get. So a caller that keeps what was
not and adds it next time loses nothing (error feedback), whatever the compressor, and
whether it rounds, drops or projects.

Compressors know no weights: a synchronizer gives them arrays times their weight, and
zeros of a replica that takes no part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _trees
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._payload import Payload, check_payload
from curvadion_jax._protocols import Group, Views


class Averaged(NamedTuple):
    """What a compressed mean gives.

    Attributes:
      mean: tree of the approximate means, like the given tree and at least float32; the
        same on all replicas.
      unsent: tree of what this replica did not put in, of the same shapes and dtypes.
        What it put in, the given array less this, has the mean `mean` over the
        replicas. Zero in every element that would not be finite, since NaN that is held
        back would spoil what comes next. Replica-varying.
      state: state of the compressor; the same on all replicas.

    Example:
      >>> Averaged(mean=2.0, unsent=1.0, state=()).mean
      2.0
    """

    mean: Any
    unsent: Any
    state: Any


class Posted(NamedTuple):
    """A form in which one replica's part is read without the others at work.

    Where there is no other round in which to send means: each posts what it has once,
    and whoever reads it knows what it stands for (`curvadion_jax.sites`).

    Attributes:
      encode: (tree of arrays) -> message, a tree of arrays.
      decode: (message, tree of arrays or their shapes) -> what the message stands for,
        a tree of at least float32.

    Example:
      >>> from curvadion_jax import compressors
      >>> tree = {"w": jnp.arange(4.0)}
      >>> posted = compressors.quantize(8, block=4).posted
      >>> message = posted.encode(tree)
      >>> message.shape, message.dtype, posted.decode(message, tree)["w"].tolist()[-1]
      ((1, 8), dtype('uint8'), 3.0)
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


class Compressor(NamedTuple):
    """Functions that say in what form a tree of arrays is averaged.

    Attributes:
      init: (tree of the parameters, views) -> compressor state, a tree of arrays the
        same on all replicas; called once, possibly on abstract values.
      average: (tree, state, group, views) -> :class:`Averaged`. `group` is a
        :class:`curvadion_jax.synchronizers.Group`.
      payload: (tree, views) -> :class:`Payload`, the bytes of one mean, from shapes
        alone.
      posted: :class:`Posted`, for parts that are read one by one; None where replicas
        must be at work together.

    `views` says for every path how Dion sees the parameter as matrices, or None.

    .. warning::
      Types and shapes of what the functions return are checked. That all replicas get
      the same mean, that it is the mean of what they put in, and that so many bytes are
      sent is not.

    Example:
      Signs, a byte each, with the mean magnitude of the array:

      >>> def average_of(x, group):
      ...     own = (x > 0).astype(jnp.int8), jnp.mean(jnp.abs(x))
      ...     stand_for = lambda positive, size: size * (2.0 * positive - 1)
      ...     values = jax.vmap(stand_for)(*group.all_gather(own))  # [N, ...]
      ...     unsent = x - stand_for(*own)
      ...     unsent = jnp.where(jnp.isfinite(unsent), unsent, 0)
      ...     return jnp.mean(values, axis=0), unsent
      >>> def average(tree, state, group, views):
      ...     leaves, structure = jax.tree.flatten(tree)
      ...     found = zip(*[average_of(x, group) for x in leaves], strict=True)
      ...     return Averaged(*map(structure.unflatten, found), state)
      >>> def payload(tree, views):
      ...     return Payload(gathered=sum(x.size + 4 for x in jax.tree.leaves(tree)))
      >>> signs = Compressor(lambda params, views: (), average, payload)
      >>> from curvadion_jax import synchronizers
      >>> synchronizer = synchronizers.reconcile(compressor=signs)
      >>> params = {"w": jnp.ones((32, 16))}
      >>> synchronizer.payload(params, (), {})
      Payload(averaged=0, gathered=516)
    """

    init: Callable[[optax.Params, Views], Any]
    average: Callable[[Any, Any, Group, Views], Averaged]
    payload: Callable[[Any, Views], Payload]
    posted: Posted | None = None


def wide(x: jax.Array) -> jax.Array:
    """The array in the dtype of the algebra, at least float32."""
    return x.astype(compute_dtype(x.dtype))


def nothing(tree: Any) -> Any:
    """What is unsent where nothing is lost."""
    return jax.tree.map(jnp.zeros_like, tree)


def unzip(structure: Any, pairs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Two trees of pairs' first and second parts."""
    first, second = zip(*pairs, strict=True) if pairs else ((), ())
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def check_compressor(compressor: Any, what: str = "compressor") -> Compressor:
    """The compressor with checks of what it returns; rejects non-Compressors."""
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"{what} must be a curvadion_jax.compressors.Compressor such as "
            f"quantize(8), got {compressor!r}"
        )

    def average(tree, state, group, views):
        return _check_averaged(compressor.average(tree, state, group, views), tree)

    def payload(tree, views):
        return check_payload(compressor.payload(tree, views))

    return compressor._replace(average=average, payload=payload)


def _check_averaged(result: Any, tree: Any) -> Averaged:
    if not isinstance(result, Averaged):
        raise TypeError(
            "average of a compressor must return a curvadion_jax.compressors."
            f"Averaged(mean, unsent, state), got a {type(result).__name__}"
        )
    for name in ("mean", "unsent"):
        given = getattr(result, name)
        if not _trees.are_alike(given, tree):
            wanted, got = (jax.tree.map(jnp.shape, x) for x in (tree, given))
            raise ValueError(
                f"{name} in what average of a compressor returns must be a tree like "
                f"the one that it is given, with shapes {wanted}, got {got}"
            )
    return result


def exact() -> Compressor:
    """Everything is sent, in at least float32.

    Returns:
      The compressor.

    Example:
      >>> from curvadion_jax._collectives import Replicas
      >>> result = exact().average({"w": jax.numpy.ones(2)}, (), Replicas(), {})
      >>> result.mean["w"].tolist()
      [1.0, 1.0]
      >>> exact().payload({"kernel": jax.numpy.ones((2, 3), jax.numpy.bfloat16)}, {})
      Payload(averaged=24, gathered=0)
    """

    def average(tree, state, group, views):
        del views
        tree = jax.tree.map(wide, tree)
        return Averaged(group.mean(tree), nothing(tree), state)

    def payload(tree, views):
        del views
        return Payload(
            averaged=sum(
                leaf.size * compute_dtype(leaf.dtype).itemsize
                for leaf in jax.tree.leaves(tree)
            )
        )

    posted = Posted(
        lambda tree: jax.tree.map(wide, tree), lambda message, like: message
    )
    return Compressor(lambda params, views: (), average, payload, posted=posted)
