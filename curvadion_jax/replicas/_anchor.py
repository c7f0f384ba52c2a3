"""The anchor in a state: found, compared with the parameters, and taken anew."""

import collections
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _counters, _memory, _paths
from curvadion_jax._adaptive_sync import AdaptiveSyncState
from curvadion_jax._paths import Names
from curvadion_jax.replicas import _placed
from curvadion_jax.replicas._checks import check_alive, check_leading, count_leading

# Fields of Optax's states that hold a tree like the parameters.
_OF_OPTAX = {(name,) for name in ("trace", "ema", "mu", "nu")}


def anchors(state: Any) -> dict[Names, dict[Names, jax.Array]]:
    """Every anchor in a state: names of the way to it -> names in it -> array.

    By name and not by type: `flax.nnx.split` makes dictionaries of named tuples.
    """
    found: dict[Names, Any] = collections.defaultdict(dict)
    for names, leaf in _paths.leaves_with_names(state):
        for index in range(2, len(names) + 1):
            if names[index - 2 : index] == ("sync_state", "anchor"):
                found[names[:index]][names[index:]] = leaf
    return dict(found)


def anchor_of(params: Any, opt_state: Any) -> list[jax.Array | None]:
    """The anchor of every parameter, None for one that has none."""
    check_replicas(params)
    check_alive(opt_state, "optimizer state")
    _check_order(params, opt_state)
    leaves = _paths.leaves_with_names(params)
    found = list(anchors(opt_state).values())
    anchor = found[0] if found else {}
    shapes = {names: leaf.shape for names, leaf in leaves}
    if len(found) > 1 or any(
        shapes.get(names) != leaf.shape for names, leaf in anchor.items()
    ):
        raise ValueError(
            f"the optimizer state holds {len(found)} anchor(s), and not one of these "
            "parameters: pass the parameters that this optimizer was initialised with, "
            "or no opt_state for the mean over the replicas"
        )
    return [anchor.get(names) for names, _ in leaves]


def _check_order(params: Any, opt_state: Any) -> None:
    trees = [dict(_paths.leaves_with_names(tree)) for tree in (params, opt_state)]
    counters = [
        [leaves[*way, "metrics", "steps"] for way in _counters.optimizers(leaves)]
        for leaves in trees
    ]
    if counters[0] and opt_state is not None and not counters[1]:
        raise ValueError(
            "the first argument holds an optimizer's state, and the second does not: "
            "give the parameters first, (params, opt_state)"
        )
    if any(not np.ndim(steps) for steps in counters[1]):
        raise ValueError(
            "the optimizer state has no replica axis: give what replicas.replicate or "
            "a step returned, as a whole"
        )


def check_replicas(params: Any) -> None:
    """Rejects parameters without a common leading axis."""
    need = (
        "replicas, as other leaves have; replicate() gives all of them one, and "
        "parameters of one model are the consensus as they are"
    )
    check_leading(params, count_leading(params, "parameters"), "parameters", need)


def drift(params: Any, opt_state: Any) -> jax.Array:
    """How far every replica is from the anchor, relative to the anchor's size.

    To look for what moves parameters behind the optimizer, such as a transformation
    after it in `optax.chain`: on a step that synchronised it is rounding, at most 6e-8
    in float32, 5e-4 in float16 and 4e-3 in bfloat16. (With ``fragments=n`` that holds
    for the fragment of this sync, and a replica that was absent keeps its drift.)

    Args:
      params: parameters with a leading replica axis.
      opt_state: the optimizer state with a leading replica axis, nnx's included.

    Returns:
      float32[N], the norm of the difference over that of the anchor, of all parameters
      together.

    Raises:
      ValueError: if leaves have no common leading axis, or the state does not hold one
        anchor of these parameters.

    Example:
      >>> import curvadion_jax as cd
      >>> mesh = cd.replicas.make_mesh(1)
      >>> state = cd.local_muon(0.1).init({"w": jnp.ones(4)})
      >>> state = cd.replicas.replicate(state, mesh)
      >>> drift({"w": jnp.full((1, 4), 1.5)}, state).tolist()
      [0.5]
    """
    found = anchor_of(params, opt_state)
    if any(anchor is None for anchor in found):
        raise ValueError(
            "the optimizer state holds no anchor of all these parameters: only "
            "synchronizers.reconcile keeps one. For the distance of the replicas from "
            "their mean use replicas.divergence"
        )
    return _drift(jax.tree.leaves(params), found)


@jax.jit
def _drift(params: list[jax.Array], anchor: list[jax.Array]) -> jax.Array:
    distance, size = squares(*_memory.to_device((params, anchor)))
    return jnp.sqrt(distance / jnp.where(size == 0, 1, size))


def squares(
    params: list[jax.Array], anchor: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Squared norms of params - anchor and of the anchor, of all arrays together.

    Returns:
      Two of float32[N], or of the arrays' own dtype where that is wider.
    """

    def square(x):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.sum(jnp.square(wide), axis=tuple(range(1, x.ndim)))

    def difference(x, a):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return x.astype(wide) - a.astype(wide)

    pairs = zip(params, anchor, strict=True)
    distance = sum((square(difference(x, a)) for x, a in pairs), start=jnp.zeros(1))
    return distance, sum(map(square, anchor), start=jnp.zeros(1))


def reanchor(state: Any) -> Any:
    """Takes the anchors anew, at the parameters of the state, with nothing owed.

    For parameters that were loaded or changed after ``tx.init``; from the next step on
    pseudo-gradients are measured from them. Momenta, outer momentum and counters stay.

    Args:
      state: parameters and optimizer state in any tree, such as a whole `TrainState`,
        with or without a leading replica axis; the same on all replicas. Of several
        trees of the same names and shapes, such as an average of the weights, the
        parameters are those called `params`.

    Returns:
      The state.

    Raises:
      ValueError: if it holds no anchor, or one without the parameters that belong to
        it.

    Example:
      >>> import curvadion_jax as cd
      >>> tx = cd.local_muon(0.1)
      >>> state = {"params": {"w": jnp.ones(2)}, "tx": tx.init({"w": jnp.zeros(2)})}
      >>> reanchor(state)["tx"].sync_state.anchor["w"].tolist()
      [1.0, 1.0]
    """
    found = with_params(state)
    if not found or any(each.params is None for each in found):
        ways = sorted({"/".join(way) for each in found for way in each.copies})
        which = f"; of {ways} call the parameters 'params'" if ways else ""
        raise ValueError(
            "the state must hold an anchor, and beside it the parameters that belong "
            "to it: give a tree of both, such as a TrainState or (params, opt_state)"
            + which
        )
    leaves = _paths.leaves_with_names(state)
    for each in found:
        leaves = [(names, each.taken_anew(names, x)) for names, x in leaves]
    return jax.tree.unflatten(jax.tree.structure(state), [x for _, x in leaves])


class Anchored(NamedTuple):
    """An anchor, and what of the state may be the parameters that belong to it.

    Attributes:
      place: names of the way to the anchor.
      anchor: names of a parameter -> array.
      copies: the same of every tree of these names and shapes that is no optimizer's
        own, by the way to it; an average of the weights is one too.
    """

    place: Names
    anchor: dict[Names, Any]
    copies: dict[Names, dict[Names, Any]]

    @property
    def optimizer(self) -> Names:
        """The way to the optimizer's state."""
        return self.place[:-2]

    @property
    def params(self) -> dict[Names, Any] | None:
        """The parameters, if it is clear which they are.

        The only copy, or the one called `params` of those nearest to the optimizer's
        state.
        """
        if len(self.copies) == 1:
            return next(iter(self.copies.values()))
        shared = {way: self._shared(way) for way in self.copies}
        nearest = [way for way in shared if shared[way] == max(shared.values())]
        named = [way for way in nearest if way[-1:] == ("params",)]
        shortest = [way for way in named if len(way) == min(map(len, named))]
        return self.copies[shortest[0]] if len(shortest) == 1 else None

    def _shared(self, way: Names) -> int:
        """How many names a way begins with that the one to the optimizer does."""
        pairs = zip(way, self.optimizer, strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def taken_anew(self, names: Names, leaf: Any) -> Any:
        """A leaf of the state after its anchor was."""
        then = (*self.place[:-1], "own", "params")  # of a sync that is under way
        for copied in (self.place, then):
            if names[: len(copied)] == copied and self.params:
                anew = jnp.array(self.params[names[len(copied) :]], leaf.dtype)
                return _memory.beside(anew, leaf)
        owed = names[: len(self.place)] == (*self.place[:-1], "residual")
        return jnp.zeros_like(leaf) if owed else leaf


def with_params(state: Any) -> list[Anchored]:
    """Every anchor in a state, beside the parameters that may belong to it."""
    found, leaves = anchors(state), _paths.leaves_with_names(state)
    optimizers = [place[:-2] for place in found]
    outside = [
        (names, leaf)
        for names, leaf in leaves
        if not _counters.is_within(names, optimizers, AdaptiveSyncState._fields)
    ]
    return [
        Anchored(place, anchor, _copies(outside, anchor))
        for place, anchor in found.items()
    ]


def _copies(leaves: list[tuple[Names, Any]], anchor: dict[Names, Any]) -> Any:
    beside: dict[Names, dict] = collections.defaultdict(dict)
    for names, leaf in leaves:
        for index in range(len(names) + 1):
            known = anchor.get(names[index:])
            if known is not None and known.shape == np.shape(leaf):
                beside[names[:index]][names[index:]] = leaf
    return {
        way: x
        for way, x in beside.items()
        if x.keys() == anchor.keys() and not _is_in_a_chain(way)
    }


def _is_in_a_chain(way: Names) -> bool:
    """Whether it leads to a field of one of the states of `optax.chain`."""
    return way[-1:] in _OF_OPTAX and any(name.isdigit() for name in way[-2:-1])


def read(function: Callable[..., Any], counters: Any, params: Any, anchor: Any) -> Any:
    """What a function says of counters and of parameters beside their anchor.

    Args:
      function: takes the counters, and a list of pairs of arrays, to a tree of arrays.
      counters: arrays of the state.
      params: names of a parameter -> array.
      anchor: the same.

    Returns:
      The tree on the host, in every process.
    """
    pairs = [_memory.to_device((params[names], a)) for names, a in anchor.items()]
    whole = _placed.everywhere(x for x, _ in pairs)
    return jax.device_get(jax.jit(function, out_shardings=whole)(counters, pairs))
