"""What a sync of `reconcile` averages of the inner optimizer's state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _finite, _momentum, _orthonormalize, _paths, _power_iteration
from curvadion_jax._dion import DionState
from curvadion_jax._within_replica import Devices
from curvadion_jax.synchronizers import _base, _fragments
from curvadion_jax.synchronizers._fragments import Fragment


def replaced(inner_state, averaged):
    """The inner state with some of its leaves, by path, replaced."""
    return _paths.map_with_path(averaged.get, inner_state)


def momenta(inner_state: optax.OptState, fragment: Fragment) -> dict[str, jax.Array]:
    """Path of the parameter -> its momentum, of a fragment's parameters."""
    field = _momentum.find_field(inner_state)
    if field is None:
        raise ValueError(
            "reconcile is to average momenta in a compressed form, and the inner "
            "optimizer keeps none: give momentum=False, or an optimizer with momentum"
        )
    found = _momentum.momentum_by_name(inner_state)
    number = sum(_momentum.in_field(inner_state, field))
    if number != len(found):
        raise ValueError(
            f"the inner optimizer keeps {number} momenta of {len(found)} parameters, "
            "and compressed is one of each: give momentum=True, which averages all of "
            "them as they are, or False"
        )
    return {name: m for name, m in found.items() if _fragments.holds(fragment, name)}


def average_momentum(inner_state, form, form_state, local, group, fragment):
    """Mean momenta, with what each replica did not send of its own on top.

    One that took no part, and has a momentum, does without the mean.
    """
    found = momenta(inner_state, fragment)
    result = form.average(local.weighted(found), form_state, group, local.views)
    unsent = _base.own_unsent(local, result.unsent)
    kept = _finite.or_zeros(~local.joins, found)
    common = _finite.or_zeros(local.joins, result.mean)
    new = {
        name: (unsent[name] + common[name] + kept[name]).astype(m.dtype)
        for name, m in found.items()
    }
    inside = _momentum.in_field(inner_state, _momentum.find_field(inner_state))
    leaves = zip(_paths.leaves_with_path(inner_state), inside, strict=True)
    paths = [path for (path, _), is_in in leaves if is_in]
    names = _momentum.momentum_by_name(inner_state)
    moved = {
        path: new[name] for path, name in zip(paths, names, strict=True) if name in new
    }
    return replaced(inner_state, moved), result.state


def _parameter_shapes(params) -> set[tuple[int, ...]]:
    return {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim}


def check_momentum_known(params, inner_state) -> None:
    shapes = _parameter_shapes(params)
    if _momentum.find_field(inner_state) is None:
        leaves = jax.tree.leaves_with_path(inner_state)
        sums = _momentum.in_field(inner_state, "acc_grads")  # of optax.MultiSteps
        for (path, leaf), is_sum in zip(leaves, sums, strict=True):
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            if leaf.shape in shapes and floating and not is_sum:
                raise ValueError(
                    "reconcile is to average the momentum and finds none by its name "
                    "(momentum, trace, mu), but the inner optimizer keeps "
                    f"{jax.tree_util.keystr(path)} of a parameter's shape: pass "
                    "momentum=False to leave it local, or other_state=True as well to "
                    "average all such arrays"
                )


def exact(
    params, inner_state, momentum: bool, other_state: bool, fragment: Fragment
) -> dict[str, jax.Array]:
    """Leaves of the inner state that are averaged as they are: path -> array."""
    leaves = zip(
        _paths.leaves_with_path(inner_state),
        _sent(params, inner_state, momentum, other_state),
        _owners(params, inner_state),
        strict=True,
    )
    return {
        path: leaf
        for (path, leaf), sent, owner in leaves
        if sent and _fragments.holds(fragment, owner)
    }


def _owners(params, inner_state) -> list[str]:
    """Path of the parameter that every leaf of the inner state belongs to.

    The longest that the leaf's own path ends with; the first one for a leaf that
    belongs to none.
    """
    names = [names for names, _ in _paths.leaves_with_names(params)]
    known, first = set(names), next(iter(names), ())

    def owner(path):
        ends = (path[start:] for start in range(len(path) + 1))
        return "/".join(next((end for end in ends if end in known), first))

    return [owner(path) for path, _ in _paths.leaves_with_names(inner_state)]


def _sent(params, inner_state, momentum: bool, other_state: bool) -> list[bool]:
    """For every leaf of the inner state whether it is averaged at some sync."""
    shapes = _parameter_shapes(params)
    field = _momentum.find_field(inner_state)
    momenta = _momentum.in_field(inner_state, field)
    q = _momentum.in_field(inner_state, "q")
    # The values of optax.inject_hyperparams, in which other states lie.
    settings = _momentum.in_field(inner_state, "hyperparams", beside=())
    return [
        jnp.issubdtype(leaf.dtype, jnp.floating)
        and (momentum if is_momentum else other_state and leaf.shape in shapes)
        and not (is_q or is_setting)
        for leaf, is_momentum, is_q, is_setting in zip(
            jax.tree.leaves(inner_state), momenta, q, settings, strict=True
        )
    ]


def common_q(inner_state, starts, views, orthonormalize, layout, fragment):
    """Q for common momenta, by a step of power iteration from common starts.

    Returns:
      The inner state and the starts, with the Q of the fragment's matrices replaced.
    """
    common, following = [], iter(starts)

    def with_new_q(state: DionState) -> DionState:
        start = next(following)
        new = _iterated(state, start, views, orthonormalize, layout, fragment)
        common.append(_with_leaves(start, new))
        return state._replace(q=_with_leaves(state.q, new))

    return _momentum.with_dion(inner_state, with_new_q), common


def _with_leaves(tree: Any, new: dict[str, jax.Array]) -> Any:
    return _paths.map_with_path(lambda name, x: new.get(name, x), tree)


def _iterated(
    state: DionState, start: Any, views, orthonormalize, layout, fragment: Fragment
) -> dict[str, jax.Array]:
    """Path -> Q after one step, of a fragment's matrices."""
    matrices = zip(
        _base.matrices(state, views).items(),
        jax.tree.leaves(state.momentum),
        jax.tree.leaves(start),
        strict=True,
    )
    seen, momenta, qs = {}, {}, {}
    for (name, (view, _)), momentum, q in matrices:
        if _fragments.holds(fragment, name):
            wide = momentum.astype(_orthonormalize.compute_dtype(momentum.dtype))
            seen[name], momenta[name], qs[name] = view, view.to_matrix(wide), q
    devices = Devices(layout)
    _, right = _power_iteration.power_iteration(
        momenta,
        {name: devices.whole(q) for name, q in qs.items()},
        functools.partial(devices.bases, views=seen, orthonormalize=orthonormalize),
    )
    return {
        name: devices.whole(_power_iteration.unit_columns(r, qs[name])[0]).astype(
            qs[name].dtype
        )
        for name, r in right.items()
    }
