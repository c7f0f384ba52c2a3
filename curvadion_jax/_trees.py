"""Trees: names of their leaves, checks, nodes of one class, small arrays packed."""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

_SMALL = 2**16  # elements of an array that may be joined with others


def is_box(node: Any) -> bool:
    """Whether a node is Flax's box around one array: an nnx variable, or linen's.

    Its `value` is not part of a name. By the class names, because Flax is not a
    dependency; a path cannot tell it from a field `value` next to `query` and `key`.
    """
    return any(
        base.__name__ in ("Variable", "VariableState", "AxisMetadata")
        and base.__module__.partition(".")[0] == "flax"
        for base in type(node).__mro__
    )


def shared_as(like: Any, tree: Any) -> Any:
    """The tree, whose nnx modules share parts as those of `like` do.

    JAX takes an nnx module for a tree, and makes two of a layer that is used twice. The
    first of them stays. Flax is no dependency: who has a module has imported it.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    is_module = lambda node: isinstance(node, nnx.Pytree)

    def share(old, new):
        if not is_module(old):
            return new
        graph, state = nnx.split(old)
        paths = [path for path, _ in nnx.to_flat_state(state)]
        if len(paths) == len(jax.tree.leaves(old)):  # Nothing is shared.
            return new
        found = dict(nnx.to_flat_state(nnx.state(new)))
        kept = nnx.from_flat_state({path: found[path] for path in paths})
        return nnx.merge(graph, kept)

    return jax.tree.map(share, like, tree, is_leaf=is_module)


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The path of every leaf, such as 'layers/attention/kernel', and the leaf."""
    found = []
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_box):
        for inner, leaf in jax.tree.leaves_with_path(node):
            # Without the `value` of a box.
            found.append((path_of((*path, *inner[1:])), leaf))
    return found


def path_of(keys: Sequence[Any]) -> str:
    """The names of JAX's keys, joined."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def map_with_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps a function of the path and the leaf."""
    results = [function(path, leaf) for path, leaf in leaves_with_path(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def check_arrays(params: Any) -> None:
    """Rejects parameters that are no arrays, and no abstract ones."""
    for name, leaf in leaves_with_path(params):
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise TypeError(
                f"Parameter {name!r} is {leaf!r:.80}, and no array. Give "
                "jax.tree.map(jax.numpy.asarray, params)."
            )


def check_trainable(params: Any) -> None:
    """Rejects parameters that are not real floating-point numbers of 16 bits or more.

    Integers and complex numbers would not be averaged, and 8 bits have no arithmetic.
    """
    check_arrays(params)
    for name, leaf in leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(
                f"Parameter {name!r} has dtype {leaf.dtype}; only real floating-point "
                "numbers of 16 bits or more can be trained. Keep others out of what "
                "init and update are given, or cast in the loss."
            )


def check_gradients(gradients: Any, params: Any) -> None:
    """Rejects missing parameters, and gradients of other names or shapes."""
    if params is None:
        raise ValueError(
            "This optimizer needs params. Call update(gradients, state, params)."
        )
    check_shapes(gradients, params)


def check_shapes(gradients: Any, expected: Any) -> None:
    """Rejects gradients of other names or shapes, which might be broadcast silently."""
    if change := first_change(expected, gradients, jnp.shape):
        path, wanted, shape = change
        raise ValueError(
            f"Gradient {path!r} is {shape}, expected {wanted}. Pass gradients and "
            "state of these parameters."
        )


def first_change(
    old: Any, new: Any, describe: Callable[[Any], Any]
) -> tuple[str, Any, Any] | None:
    """The first path of which two trees have other leaves: path, old and new one.

    A leaf is what `describe` says of it, or "missing".
    """
    # By names, because not every class of pytree nodes can be compared.
    was, now = (
        {path: describe(leaf) for path, leaf in leaves_with_path(tree)}
        for tree in (old, new)
    )
    for path in [*was, *now]:
        before, after = (leaves.get(path, "missing") for leaves in (was, now))
        if before != after:
            return path, before, after
    return None


def is_key(x: Any) -> bool:
    """Whether an array holds random keys of JAX, whose type tells."""
    return jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)


def may_be_key(x: Any) -> bool:
    """Whether it is an array of random keys, or one that `PRNGKey` could have made."""
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    return is_key(x) or (x.shape == (2,) and x.dtype == jnp.uint32)


def nodes_of(kind: type, tree: Any) -> list[Any]:
    """The outermost nodes of a tree that are of this class."""
    is_one = lambda node: isinstance(node, kind)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def map_nodes(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the outermost nodes of this class, and leaves all else as it is."""
    is_one = lambda node: isinstance(node, kind)
    return jax.tree.map(lambda x: function(x) if is_one(x) else x, tree, is_leaf=is_one)


def packed(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The large arrays, then the small ones of each dtype joined to a vector.

    For reductions: one for each array would make up half of a program. What several
    devices may share is not joined, since the compiler would send it, and has the same
    order.
    """
    found = [x for x in arrays if x.size > _SMALL]
    small = defaultdict(list)
    for x in arrays:
        if x.size <= _SMALL:
            small[x.dtype].append(x)
    for group in small.values():
        if all(devices(x) == 1 for x in group):
            group = [jnp.concatenate([x.reshape(-1) for x in group])]
        found += group
    return found


def devices(x: jax.Array) -> int:
    """How many devices the compiler may divide an array over; 1 for one replica's."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in axes if kind != AxisType.Manual)
