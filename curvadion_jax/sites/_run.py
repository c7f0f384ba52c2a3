"""A run: its description, its members, its snapshots, and what is kept of it."""

import logging
import uuid
from typing import Any

from curvadion_jax.sites import _rounds, _store
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._rounds import Roster
from curvadion_jax.sites._store import InvalidError, RunError, Store

log = logging.getLogger("curvadion_jax.sites")

# Snapshots that are kept; rounds before the first of them are collected.
_KEPT = 2


def join(store: Store, name: str) -> int:
    """Makes the site a member; how often a site of this name has joined, now included.

    Of each name one object is kept, of the site that joined last.
    """
    prefix = f"{_rounds.MEMBERS}{name}/"
    while True:
        keys = store.keys(prefix)
        incarnation = _rounds.members(keys).newest.get(name, 0) + 1
        key = _rounds.member_key(name, incarnation)
        data = _store.seal({"uid": uuid.uuid4().hex})
        if not store.create(key, data):
            continue
        if store.create(key, b"{}"):
            raise RuntimeError(
                f"The store {store.url} overwrites objects, so that two sites could "
                "both commit a round. Use one with conditional writes (If-None-Match)."
            )
        store.delete([old for old in keys if _rounds.members([old]).newest])
        return incarnation


def leave(store: Store, name: str, incarnation: int) -> None:
    """The others do not wait for the site any more."""
    store.create(_rounds.member_key(name, incarnation, "left"), b"{}")
    store.delete([_rounds.member_key(name, incarnation)])


def mismatch(name: str, number: int, ours: str, theirs: Any) -> RunError:
    """The error of a site whose outer parameters are not the run's."""
    return RunError(
        f"Before round {number} the outer parameters of this site, {name!r}, have the "
        f"digest {ours} and the run's {theirs!r:.40}. Give all sites the same outer "
        "optimizer, compressor, JAX and Optax, and start this site again."
    )


def description(model: Model, quorum: int) -> dict[str, Any]:
    """What all sites of a run must have in common."""
    forms = [[str(x.dtype), list(x.shape)] for x in model.shapes]
    return {
        "model": [[name, *form] for name, form in zip(model.names, forms, strict=True)],
        "message": [[str(x.dtype), list(x.shape)] for x in model.message],
        "outer": model.fingerprint,
        "quorum": quorum,
    }


def read(store: Store, exists: bool = False) -> dict[str, Any] | None:
    """The run's description, with where it begins; None if there is no run."""
    try:
        data = store.get(_rounds.RUN, _store.HEADER, exists)
        return None if data is None else _store.unseal(data)
    except InvalidError as error:
        raise RunError(
            f"{_rounds.RUN} at {store.url} cannot be used: {error}. Give another URL, "
            "or the version of curvadion_jax that began the run."
        ) from None


def begin(
    store: Store, model: Model, own: dict[str, Any], params: Arrays
) -> dict[str, Any]:
    """Makes a run, unless another site does at this moment."""
    key = f"initial/{uuid.uuid4().hex}"
    run = _store.unseal(_store.seal(own | {"initial": key}))
    _write(store, key, run, model.initial(params), {}, 0)
    store.create(_rounds.RUN, _store.seal(own | {"initial": key}))
    found = read(store, exists=True)
    if found is None:
        raise RunError(f"{_rounds.RUN} was created at {store.url} and is not there.")
    if found["initial"] != key:
        store.delete([key, *store.keys(f"parts/{key}/")])
    return found


def check(run: dict[str, Any], own: dict[str, Any]) -> None:
    """Rejects a run of another model, compressor, outer optimizer or quorum."""
    if (theirs := run.get("model")) != own["model"]:
        raise ValueError(
            "The parameters are not those of the run, which another site has begun: "
            f"{_difference(own['model'], theirs or [])}. Give the same model, or "
            "another URL."
        )
    for name, what in (
        ("message", "compressor"),
        ("outer", "outer optimizer, or other versions of JAX and Optax"),
        ("quorum", f"quorum: {own['quorum']} here, {run.get('quorum')!r} there"),
    ):
        if own[name] != run.get(name):
            raise ValueError(
                f"The run was begun with another {what}. Give all sites the same."
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


def load(
    store: Store, model: Model, run: dict[str, Any], least: int = 0
) -> tuple[Outer, Roster, int]:
    """The newest outer side that can be read, its roster, and the next round's number.

    A snapshot that is damaged, or that the commit after it does not confirm, is passed
    over for an older one.

    Raises:
      RunError: if there is none before round `least` or a later one.
    """
    numbers = [n for n in map(_rounds.number_of, store.keys(_rounds.SNAPSHOTS)) if n]
    keys = {number: _rounds.snapshot_key(number) for number in sorted(numbers)[::-1]}
    for number, key in (keys | {0: run["initial"]}).items():
        if number < least:
            break
        try:
            found = _store.read(store, key, "snapshot", run["sha256"], model.snapshot)
            if found is None:
                raise InvalidError("it is missing")
            header, arrays = found
            outer = model.from_snapshot(arrays)
            if header["round"] != number:
                raise InvalidError(f"its round is {header['round']!r}")
            data = store.get(_rounds.commit_key(number), _store.HEADER, number > 0)
            if number and data is None:
                raise InvalidError("no commit confirms it")
            before = data and _rounds.read_commit(data, number)["before"]
            if before not in (None, outer.digest):
                raise InvalidError("it is not what the commit after it confirms")
            return outer, header["roster"], number
        except InvalidError as error:
            log.warning("%s is not used: %s", key, error)
    raise RunError(
        f"The run at {store.url} has no snapshot from which this site can continue "
        f"after round {least}. Something else removes or changes its objects."
    )


def write_snapshot(
    store: Store, run: dict[str, Any], outer: Outer, roster: Roster, number: int
) -> None:
    """Writes the outer side before a round, and collects what lies long before it."""
    _write(store, _rounds.snapshot_key(number), run, outer, roster, number)
    found = map(_rounds.number_of, store.keys(_rounds.SNAPSHOTS))
    numbers = sorted(each for each in found if each and each <= number)
    if len(numbers) <= _KEPT:
        return
    first = numbers[-_KEPT]
    for prefix in (_rounds.SNAPSHOTS, _rounds.ROUNDS, "parts/"):
        found = [(_rounds.number_of(key), key) for key in store.keys(prefix)]
        store.delete([key for n, key in found if n is not None and n < first])


def _write(
    store: Store,
    key: str,
    run: dict[str, Any],
    outer: Outer,
    roster: Roster,
    number: int,
) -> None:
    header = {
        "kind": "snapshot",
        "run": run["sha256"],
        "round": number,
        "roster": roster,
    }
    _store.write(store, key, _store.pack(header, [*outer.anchor, *outer.state]))
