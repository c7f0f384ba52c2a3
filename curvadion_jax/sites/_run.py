"""What a run is: its description, the outer side in full, and what is kept of it."""

import json
import uuid
from typing import Any

from curvadion_jax.sites import _messages, _rounds
from curvadion_jax.sites._messages import Refused, RunError
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._rounds import Roster
from curvadion_jax.sites._store import Store

# Snapshots that are kept; rounds before the first of them are collected.
_KEPT = 2


def differs(name: str, number: int, ours: str, theirs: str) -> RunError:
    """The error of a site whose outer parameters are not the run's."""
    return RunError(
        f"before round {number} the outer parameters of this site, {name!r}, have the "
        f"digest {ours}, and those of the run {theirs}: give all sites the same outer "
        "optimizer, compressor, and versions of JAX and Optax, and start this one again"
    )


def description(model: Model, quorum: int) -> dict[str, Any]:
    """What all sites of a run must have in common."""
    leaves = zip(model.names, _messages.describe(model.shapes), strict=True)
    return {
        "format": _messages.FORMAT,
        "model": [[name, *form] for name, form in leaves],
        "messages": [_messages.describe(x) for x in model.messages],
        "quorum": quorum,
        "snapshot": _messages.describe(model.snapshot[len(model.names) :]),
    }


def read(store: Store) -> dict[str, Any] | None:
    data = store.get(_rounds.RUN)
    return None if data is None else _messages.as_object(data)


def begin(
    store: Store, model: Model, own: dict[str, Any], params: Arrays
) -> dict[str, Any]:
    """Makes a run, unless another does at this moment."""
    outer, key = model.initial(params), f"initial/{uuid.uuid4().hex}"
    _write(store, model, key, outer, {}, 0)
    store.create(_rounds.RUN, json.dumps(own | {"initial": key}).encode())
    found = read(store)
    if found is None:
        raise RunError(f"{_rounds.RUN} was created, and is not there")
    if found["initial"] != key:
        store.delete([key, *store.keys(f"parts/{key}/")])
    return found


def load(store: Store, model: Model, key: str) -> tuple[Outer, Any, int]:
    """The outer side of a snapshot, the roster, and the number of the next round."""
    found = _messages.read(store, key, "snapshot", model.snapshot)
    if found is None:
        raise RunError(f"{key} of the run is missing")
    header, arrays = found
    outer = model.from_snapshot(arrays)
    if outer.digest != header.get("digest"):
        raise Refused(f"{key} does not hold the model that it says")
    return outer, header["roster"], header["round"] + 1


def write_snapshot(
    store: Store, model: Model, outer: Outer, roster: Roster, number: int
) -> None:
    """Writes the outer side before a round, and collects what lies long before."""
    if number:
        _write(store, model, _rounds.snapshot_key(number - 1), outer, roster, number)
        _collect(store)


def _write(
    store: Store, model: Model, key: str, outer: Outer, roster: Roster, number: int
) -> None:
    header = {
        "kind": "snapshot",
        "round": number - 1,
        "roster": roster,
        "digest": outer.digest,
    }
    _messages.write(store, key, header, model.to_snapshot(outer))


def _collect(store: Store) -> None:
    """Removes what nobody reads any more; commits stay, as the run's history."""
    snapshots = store.keys(_rounds.SNAPSHOTS)
    if len(snapshots) <= _KEPT:
        return
    first = snapshots[-_KEPT]
    number = int(first.removeprefix(_rounds.SNAPSHOTS))
    store.delete(snapshots[:-_KEPT])
    for prefix, end in (
        (_rounds.ROUNDS, _rounds.post_key(number)),
        (f"parts/{_rounds.ROUNDS}", f"parts/{_rounds.post_key(number)}"),
        (f"parts/{_rounds.SNAPSHOTS}", f"parts/{first}"),
    ):
        store.delete([key for key in store.keys(prefix) if key < end])


def check(run: dict[str, Any], own: dict[str, Any]) -> None:
    """Rejects a run of another format, model or settings."""
    _messages.check_format(run, "the run")
    theirs, ours = run.get("model") or [], own["model"]
    if theirs != ours:
        raise ValueError(
            "the parameters are not those of the run, which another site has begun: "
            f"{_difference(ours, theirs)}. Give the same model, or another URL"
        )
    for name, what in (
        ("messages", "compressor and fragments"),
        ("snapshot", "outer optimizer"),
        ("quorum", "quorum"),
    ):
        given, wanted = own[name], run.get(name)
        if given != wanted:
            numbers = f": {given} here, {wanted} there" if name == "quorum" else ""
            raise ValueError(
                f"the run was begun with another {what}{numbers}; give all sites the "
                "same"
            )


def _difference(ours: list[Any], theirs: list[Any]) -> str:
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            (name, dtype, shape), (other_name, other_dtype, other_shape) = own, other
            return (
                f"{name} {dtype}{shape} here, {other_name} {other_dtype}{other_shape} "
                "there"
            )
    return f"{len(ours)} parameters here, {len(theirs)} there"
