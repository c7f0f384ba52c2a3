"""The only file that talks across replicas.

Everything here takes `axis_name: str | None`; None is one replica, for which every
reduction is the identity. Besides the reductions it holds what JAX knows of who holds
what, and the check that gradients are still each replica's own.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax import _sharding
from curvadion_jax._group import Group, single


def check_axis_name(axis_name: Any) -> None:
    """Refuses what is not one name: a tuple of them would blind the guards."""
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a string or None, got {axis_name!r}")


def axis_size(axis_name: str | None) -> int:
    """Number of replicas.

    Raises:
      ValueError: if no such axis is bound where this is called.
    """
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        bound = list(jax.sharding.get_abstract_mesh().manual_axes)
        here = f" (bound here: {', '.join(map(repr, bound))})" if bound else ""
        raise ValueError(
            f"the axis {axis_name!r} is not bound here{here}: call `update` inside "
            f"curvadion_jax.replicas.step (or a shard_map or vmap with the axis "
            f"{axis_name!r}), or pass axis_name=None for one replica"
        ) from error


def _varying(x: Any) -> frozenset[str]:
    return varying_aval(jax.typeof(x))


def varying_aval(aval: Any) -> frozenset[str]:
    return aval.manual_axis_type.varying


def is_checked(axis_name: str | None) -> bool:
    """Whether JAX tracks here what differs over the axis (shard_map, check_vma on)."""
    if axis_name is None or not is_manual(axis_name):
        return False
    return axis_name in _varying(lax.axis_index(axis_name))


def is_manual(axis_name: str | None) -> bool:
    """Whether the axis is one of an enclosing shard_map (and not of a vmap)."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def checked_axes() -> list[str]:
    """Axes of enclosing shard_maps over which JAX tracks what differs."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return [axis for axis in manual if is_checked(axis)]


def varying_manual_axes(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps, of more than one device, over which x differs."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return frozenset(axis for axis in _varying(x) if sizes.get(axis, 1) > 1)


def is_varying(x: Any, axis_name: str) -> bool:
    """Whether x may differ over the axis, as far as JAX tracks it."""
    return axis_name in _varying(x)


def vary(tree: Any, axis_name: str | None) -> Any:
    """Marks every array as one that may differ over the axis; no communication."""
    if axis_name is None or not is_checked(axis_name):
        return tree

    def cast(x):
        if axis_name in _varying(x):
            return x
        return lax.pcast(x, (axis_name,), to="varying")

    return jax.tree.map(cast, tree)


def mean(tree: Any, axis_name: str | None) -> Any:
    """Mean over replicas of every array, in at least float32, cast back."""
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(vary(tree, axis_name))
    wide = [x.astype(jnp.promote_types(x, jnp.float32)) for x in leaves]
    means = _means(jax.tree.unflatten(structure, wide), axis_name)
    cast = [new.astype(x.dtype) for new, x in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(structure, cast)


def _means(tree: Any, axis_name: str) -> list[jax.Array]:
    """Means of varying arrays, each element sent once where it can be seen how."""
    leaves, axes = jax.tree.leaves(tree), _sharding.inner_axes()
    specs = _sharding.specs(tree, axes, by_shape=False) if axes else []
    cut = {
        index: (leaves[index], spec)
        for index, spec in enumerate(specs)
        if spec is not None and _shared_by(leaves[index], spec, axes)
    }
    rest = {index: x for index, x in enumerate(leaves) if index not in cut}
    means = lax.pmean(rest, axis_name)
    if cut:

        def each(_, parts):
            return [(x,) for x in lax.pmean(parts, axis_name)]

        pairs = _divided(axis_name, each, *map(list, zip(*cut.values(), strict=True)))
        means |= {index: x for index, (x,) in zip(cut, pairs, strict=True)}
    return [means[index] for index in range(len(leaves))]


def group(axis_name: str | None) -> Group:
    """What a synchronizer may do over the axis.

    Results are marked as varying, for code whose conditions mix them with local state.
    """
    if axis_name is None:
        return single()

    def over(collective):
        def apply(tree):
            tree = vary(tree, axis_name)
            return vary(jax.tree.map(collective, tree), axis_name)

        return apply

    return Group(
        size=axis_size(axis_name),
        replica=lax.axis_index(axis_name),
        mean=lambda tree: vary(mean(tree, axis_name), axis_name),
        all_to_all=over(lambda x: lax.all_to_all(x, axis_name, 0, 0)),
        all_gather=over(lambda x: lax.all_gather(x, axis_name)),
        by_device=functools.partial(_by_device, axis_name),
    )


def _by_device(
    axis_name: str, function: Callable[[Group, list], list], tree: Any
) -> list:
    """See `Group.by_device`."""
    leaves, axes = jax.tree.leaves(tree), _sharding.inner_axes()
    if not axes:
        return function(group(axis_name), leaves)
    _sharding.check_noted()
    specs = [spec or PartitionSpec() for spec in _sharding.specs(tree, axes)]
    return _divided(axis_name, function, leaves, specs)


def _divided(
    axis_name: str,
    function: Callable[[Group, list], list],
    leaves: list[jax.Array],
    specs: list[PartitionSpec],
) -> list:
    """What the function returns for the devices' own parts of arrays, put together."""
    axes = _sharding.inner_axes()
    together = defaultdict(list)
    for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        shared = _shared_by(leaf, spec, axes)
        together[_sharding.named_axes(spec), shared].append(index)
    results: list[Any] = [None] * len(leaves)
    for (_, shared), members in together.items():
        divided = [specs[index] for index in members]
        mapped = jax.shard_map(
            functools.partial(_of_parts, axis_name, function, shared),
            in_specs=(divided,),
            out_specs=divided,
            axis_names=set(axes),
        )
        found = mapped([leaves[index] for index in members])
        for index, pair in zip(members, found, strict=True):
            results[index] = pair
    return results


# An array of fewer elements a device is sent whole by each: putting it together again
# is another message inside the replica.
_LEAST_PIECE = 256


def _shared_by(x: Any, spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Inner axes whose devices hold the same part, of which each sends a piece."""
    named = _sharding.named_axes(spec)
    enough = x.size >= math.prod(axes.values()) * _LEAST_PIECE
    return tuple(axis for axis in axes if enough and axis not in named)


def _of_parts(axis_name, function, shared: tuple[str, ...], parts: list) -> list:
    """The function of this device's piece of each part, in one dimension if cut."""
    if not shared:
        return function(group(axis_name), parts)
    number = lax.axis_size(shared)

    def piece(x):
        pieces = jnp.pad(x.reshape(-1), (0, -x.size % number)).reshape(number, -1)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index(shared), keepdims=False)

    def joined(found, x):
        whole = lax.all_gather(found, shared, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape)

    results = function(group(axis_name), [piece(x) for x in parts])
    pairs = zip(results, parts, strict=True)
    return [tuple(joined(found, x) for found in result) for result, x in pairs]


def largest(
    number: jax.Array, axis_name: str | None, asked: jax.Array | None = None
) -> jax.Array:
    """The largest of the replicas' numbers, int32[]: one int32 scalar all-reduce.

    Integers, because a float maximum drops NaN in shard_map on CPU.

    Args:
      number: that of one replica.
      axis_name: replica axis.
      asked: bool[], the same on all replicas; where it is false nothing is reduced, and
        the answer is 0. None always asks.

    Raises:
      ValueError: if `asked` may differ between replicas.
    """
    if axis_name is not None and asked is not None and is_varying(asked, axis_name):
        raise ValueError(
            f"the step differs between the replicas of axis {axis_name!r}; some would "
            "wait for ever for the others. A counter in the state cannot be seen to be "
            "the same on all of them: give them the number of the step from outside, "
            "as a further argument of the function that replicas.step returns, "
            "train(state, batch, step)"
        )

    def reduce(number):
        if axis_name is None:
            return number
        return lax.pmax(vary(number, axis_name), axis_name)

    if asked is None:
        return reduce(number)
    return lax.cond(asked, reduce, lambda _: jnp.zeros([], jnp.int32), number)


def require_local(
    gradients: Any, axis_name: str | None, *, allow_unchecked: bool = False
) -> None:
    """Refuses gradients that were averaged over the replicas before they came here.

    Raises:
      ValueError: if a gradient is the same on all replicas by its type, so that it was
        reduced already; if nothing is tracked because of check_vma=False and that was
        not allowed; or, for axis_name=None, if gradients differ between the devices
        of an enclosing shard_map.
    """
    leaves = jax.tree.leaves_with_path(gradients)
    if axis_name is None:
        for path, leaf in leaves:
            if axes := varying_manual_axes(leaf):
                raise ValueError(
                    f"axis_name is None, but the gradient "
                    f"{jax.tree_util.keystr(path)} differs along the mesh axis "
                    f"{', '.join(sorted(axes))}: replicas would drift apart and never "
                    f"synchronise. Pass axis_name={min(axes)!r}"
                )
        return
    axis_size(axis_name)
    if not is_manual(axis_name):
        return
    if not is_checked(axis_name):
        if allow_unchecked:
            return
        raise ValueError(
            "shard_map was called with check_vma=False, so gradients that are "
            f"averaged over {axis_name!r} already cannot be told from local ones. "
            "Leave check_vma on, or use curvadion or adaptive_sync with "
            "allow_unchecked=True and make sure of it yourself"
        )
    for path, leaf in leaves:
        if axis_name not in _varying(leaf):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is the same on all "
                f"replicas of {axis_name!r}: it has been reduced over the axis before "
                "it got here, so every step communicates in full. Either the "
                "parameters are not replica-varying (in_specs P(): use "
                "curvadion_jax.replicas.replicate and replicas.step, which give them "
                "a leading replica axis), or the gradients go through a pmean or "
                "psum: remove it"
            )
