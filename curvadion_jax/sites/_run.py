"""A run: its description, its members, its snapshots, and what is kept of it."""

import itertools
import logging
import uuid
from typing import Any

from curvadion_jax.sites import _rounds, _store
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._rounds import Roster
from curvadion_jax.sites._store import InvalidError, RunError, Store, StoreError

log = logging.getLogger("curvadion_jax.sites")

# Snapshots that are kept; rounds before the first of them are collected.
_KEPT = 2


def join(store: Store, name: str) -> int:
    """Makes the site a member; how often a site of this name has joined, now included.

    Of each name one object is kept, of the site that joined last.
    """
    while True:
        keys = store.keys(f"{_rounds.MEMBERS}{name}/")
        incarnation = _rounds.members(keys).newest.get(name, 0) + 1
        key = _rounds.member_key(name, incarnation)
        if not store.create(key, _store.seal({"uid": uuid.uuid4().hex})):
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


def read(store: Store, exists: bool = False) -> dict[str, Any] | None:
    """The run's description, and where it begins; None if there is no run."""
    try:
        data = store.get(_rounds.RUN, _store.HEADER, exists)
        return None if data is None else _store.unseal(data)
    except InvalidError as error:
        raise RunError(
            f"{_rounds.RUN} at {store.url} cannot be used: {error}. Give another URL, "
            "or the version of curvadion_jax that began the run."
        ) from None


def enter(store: Store, model: Model, quorum: int, params: Arrays) -> dict[str, Any]:
    """The description of the run, which begins at these parameters if it is new.

    Raises:
      ValueError: if it is of another model, compressor, outer optimizer or quorum.
    """
    forms = [[str(x.dtype), list(x.shape)] for x in model.shapes]
    own = {
        "model": [[name, *form] for name, form in zip(model.names, forms, strict=True)],
        "compressor": [[str(x.dtype), list(x.shape)] for x in model.message],
        "outer optimizer (or JAX, or Optax)": [model.fingerprint()],
        "quorum": [quorum],
    }
    run = read(store)
    if run is None:
        key = f"initial/{uuid.uuid4().hex}"
        description = _store.seal(own | {"initial": key})
        begun = _store.unseal(description)
        _write(store, key, begun, model.initial(params), {}, 0)
        store.create(_rounds.RUN, description)
        run = read(store, exists=True)
        if run is None:
            raise StoreError(f"{_rounds.RUN} was created at {store.url} and is gone")
        if run["initial"] != key:  # another site has begun it at this moment
            store.delete([key, *store.keys(f"parts/{key}/")])
    for what, ours in own.items():
        for one, other in itertools.zip_longest(ours, run.get(what) or []):
            if one != other:
                raise ValueError(
                    f"The run was begun with another {what}: {one} here, "
                    f"{other!r:.200} there. Give all sites the same, or another URL."
                )
    return run


def mismatch(name: str, number: int, ours: str, theirs: Any) -> RunError:
    """The error of a site whose outer parameters are not the run's."""
    return RunError(
        f"Before round {number} the outer parameters of this site, {name!r}, have the "
        f"digest {ours} and the run's {theirs!r:.40}. Give all sites the same outer "
        "optimizer, compressor, JAX and Optax, and start this site again."
    )


def load(
    store: Store, model: Model, run: dict[str, Any], least: int = 0
) -> tuple[Outer, Roster, int]:
    """The newest outer side that can be read, its roster, and the next round's number.

    A snapshot that is damaged, or that the commit after it does not confirm, is passed
    over for an older one.
    """
    numbers = [n for n in map(_rounds.number_of, store.keys(_rounds.SNAPSHOTS)) if n]
    for number in [*sorted(numbers, reverse=True), 0]:
        if number < least:
            break
        key = _rounds.snapshot_key(number) if number else run["initial"]
        try:
            found = _store.read(store, key, "snapshot", run["sha256"], model.snapshot)
            commit = _rounds.commit_key(number)
            data = store.get(commit, _store.HEADER, exists=number > 0)
            if found is None or (number and data is None):
                raise InvalidError("it is missing, or the commit after it")
            (header, arrays), before = found, None
            if data is not None:
                before = _rounds.read_commit(data, number)["before"]
            outer = model.from_snapshot(arrays)
            if header["round"] != number or before not in (None, outer.digest):
                raise InvalidError("it is not what the commit after it confirms")
            return outer, header["roster"], number
        except InvalidError as error:
            log.warning("%s is not used: %s", key, error)
    raise StoreError(
        f"the store {store.url} has no snapshot that can be used of round {least} or "
        "later, and earlier contributions are not found"
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
    header = {"kind": "snapshot", "run": run["sha256"], "round": number}
    arrays = [*outer.anchor, *outer.state]
    _store.write(store, key, header | {"roster": roster}, arrays)
