"""What a checkpoint holds of a state, and when the two do not fit."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from curvadion_jax._version import __version__

_FORMAT = 1

Leaves = dict[str, Any]  # arrays, abstract or not, by their path in the state


def named_leaves(state: Any, *kinds: type) -> Leaves:
    """The leaves by path, all of a kind and with one leading replica axis."""
    # Orbax joins the keys of a nested tree with dots, so that {"a.b": x} and
    # {"a": {"b": y}} share a name, and sorts the keys of a node, which fails for the
    # mixed keys of nnx modules. A flat dictionary has neither trouble.
    leaves, first = {}, ""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves of the state are named {name!r}; rename one.")
        if not isinstance(leaf, kinds):
            raise TypeError(
                f"leaf {name!r} is a {type(leaf).__name__}, not a jax.Array with a"
                " leading replica axis; replicas.replicate makes such a state."
            )
        leaves[name], first = leaf, first or name
        if not leaf.shape or leaf.shape[:1] != leaves[first].shape[:1]:
            raise ValueError(
                f"leaf {name!r} is {_describe(leaf)}, where {first!r} is"
                f" {_describe(leaves[first])}, and all leaves share one leading replica"
                " axis: call replicas.replicate(state, mesh) first, and save or restore"
                " what it returns."
            )
        if 0 in leaf.shape:
            raise ValueError(
                f"leaf {name!r} is {_describe(leaf)}: leave arrays of size 0 out of"
                " what is saved."
            )
    if not leaves:
        raise ValueError("the state is an empty tree; give the whole training state.")
    return leaves


def count(leaves: Leaves) -> int:
    """The number of replicas."""
    return next(iter(leaves.values())).shape[0]


def abstract(leaves: Leaves) -> dict[str, jax.ShapeDtypeStruct]:
    """Where the leaves are to be, each with a sharding."""
    if placeless := [name for name, leaf in leaves.items() if leaf.sharding is None]:
        raise ValueError(
            f"leaf {placeless[0]!r} of the target has no sharding, so no place to be"
            " restored to; give jax.ShapeDtypeStruct(..., sharding=...)."
        )
    kept = jax.ShapeDtypeStruct
    return {n: kept(x.shape, x.dtype, sharding=x.sharding) for n, x in leaves.items()}


def note(step: int, leaves: Leaves, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The notes to save beside the arrays, as JSON has them."""
    if not isinstance(extra, Mapping | None):
        raise TypeError(f"extra must be a dictionary, got a {type(extra).__name__}.")
    try:
        extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"extra must be what JSON can hold: {error}. Arrays belong in the state."
        ) from error
    described = {name: _describe(leaf) for name, leaf in leaves.items()}
    held = {"replicas": count(leaves), "leaves": described, "extra": extra}
    return {"format": _FORMAT, "version": __version__, "step": step, **held}


def check_notes(info: Any, where: str) -> None:
    """Rejects notes that are not those of `note`, or of another version."""
    if not isinstance(info, dict) or "format" not in info:
        raise ValueError(
            f"{where} has no notes of ours; restore it with what wrote it."
        )
    if info["format"] != _FORMAT:
        raise ValueError(
            f"{where} has format {info['format']}, written by curvadion-jax"
            f" {info.get('version')}; this is {__version__} and reads format {_FORMAT}."
            " Use the version that wrote it."
        )
    if missing := {"replicas", "leaves", "extra"} - info.keys():
        lacks = f"no {sorted(missing)} in info/metadata"
        raise ValueError(f"{where} is damaged, {lacks}: restore another step.")


def check_fit(info: dict[str, Any], leaves: Leaves, where: str) -> None:
    """Rejects a target of other names, shapes or dtypes, but for the replicas."""
    saved, before = info["leaves"], info["replicas"]
    wanted = {name: _describe(leaf, before) for name, leaf in leaves.items()}
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"leaf {name!r} is {saved.get(name, 'missing')} at {where} and"
                f" {wanted.get(name, 'missing')} in the target. Build the target with"
                " the model and the optimizer of the saved run."
            )


def _describe(leaf: Any, replicas: int | None = None) -> str:
    shape = leaf.shape if replicas is None else (replicas, *leaf.shape[1:])
    return f"{leaf.dtype}[{','.join(map(str, shape))}]"
