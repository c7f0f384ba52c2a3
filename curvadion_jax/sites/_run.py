"""A run as it lies in the store: description, members, rounds, commits and snapshots.

Every site decides with its own clock whether a round is over. The decision is the
commit, a small object that can be created once and that all sites follow, so two sites
may decide differently.
"""

import itertools
import logging
import math
import re
import statistics
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from curvadion_jax.sites import _headers
from curvadion_jax.sites._arrays import Arrays, to_host
from curvadion_jax.sites._headers import NAME
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._outer_step import Outer
from curvadion_jax.sites._store import InvalidError, Store, StoreError, attempts

log = logging.getLogger(__package__)

# After so many rounds without a contribution a site is not waited for, and its share
# of the mean goes to the others.
FORGET = 4
# Of three or more contributions, those beyond so many median norms are rejected.
MAX_NORM = 10.0
# A contribution of many rounds may be so many times as long as one of a single round.
_MOST_ROUNDS = 32
# Members that have left or died, and are kept: they may come back, and a quorum counts
# those that have left.
_KEPT_MEMBERS = 100
# Members that are removed at once.
_REMOVED = 1000
# Snapshots that are kept. Rounds before the first of them are collected.
_KEPT = 2

RUN, MEMBERS, SNAPSHOTS = "run.json", "members/", "snapshots/"
contribution_key = "rounds/{:08d}/{}".format
commit_key = "commits/{:08d}.json".format
snapshot_key = "snapshots/{:08d}".format
member_key = "members/{}/{:06d}.{}".format
_MEMBER = re.compile(rf"members/({NAME.pattern})/([0-9]{{6,15}})\.(json|left)")
_NUMBERED = re.compile(
    r"(?:bodies/)?(?:snapshots|commits|rounds)/([0-9]{8})(?:\.json|/.*)?"
)

# name -> the last round in which the site counted, and its tokens per round.
Roster = Mapping[str, Sequence[float]]


class Members(NamedTuple):
    """Who has ever joined: name -> newest incarnation, and who of them has left."""

    newest: dict[str, int]
    left: frozenset[str]

    def needed(self, quorum: int, roster: Roster) -> int:
        """Contributions that a round needs; fewer once sites have left for good."""
        # A listing may lack sites, which must not look as if they had left.
        names = self.newest.keys() | roster.keys()
        if len(names) < quorum:
            return quorum
        return max(1, min(quorum, len(names - self.left)))


class Received(NamedTuple):
    """A contribution as it was read, and why it cannot count if it cannot."""

    name: str
    header: dict[str, Any]
    arrays: Arrays
    norm: float = math.nan
    why: str = ""


def members(keys: Iterable[str]) -> Members:
    """From the keys below `MEMBERS`."""
    newest: dict[str, tuple[int, bool]] = {}
    for found in filter(None, map(_MEMBER.fullmatch, keys)):
        own = int(found[2]), found[3] == "left"
        newest[found[1]] = max(newest.get(found[1], own), own)
    left = frozenset(name for name, (_, gone) in newest.items() if gone)
    return Members({name: number for name, (number, _) in newest.items()}, left)


def enter(store: Store, model: Model, quorum: int) -> None:
    """Compares the description of the run, and creates it if there is none."""
    own = {
        "model": [
            [name, str(x.dtype), [*x.shape]]
            for name, x in zip(model.names, model.shapes, strict=True)
        ],
        "compressor": [[str(x.dtype), [*x.shape]] for x in model.message],
        "outer optimizer (or JAX, or Optax)": [model.outer_step.fingerprint],
        "quorum": [quorum],
    }
    if store.read(RUN) is None:
        # Again: another site may have begun the run meanwhile.
        if store.keys("commits/") and store.read(RUN) is None:
            raise StoreError(
                f"{RUN} at {store.url} is gone, and the run's commits are there. "
                "Restore it, or begin a run at another URL."
            )
        store.write(RUN, own | {"uid": uuid.uuid4().hex})
    found = store.read(RUN, exists=True)
    if found is None:
        raise StoreError(f"{RUN} was created at {store.url} and is gone.")
    for what, ours in own.items():
        theirs = found[0].get(what) or []
        theirs = theirs if isinstance(theirs, list) else [theirs]
        for one, other in itertools.zip_longest(ours, theirs):
            if one != other:
                raise ValueError(
                    f"The run was begun with another {what}: {one} here, "
                    f"{other!r:.200} there. Give all sites the same, or another URL."
                )
    store.run = found[0]["sha256"]


def join(store: Store, name: str) -> int:
    """Makes the site a member. Returns how often a site of this name has joined.

    One object is kept for each name, of the site that joined last. A listing may be
    older than what was created, and may lack a predecessor whose number is higher. So
    the site is a member once a listing holds its object, and none that is newer.
    """
    prefix, key, incarnation, overwrites = f"{MEMBERS}{name}/", "", 0, False
    found = members(store.keys(prefix))
    for _ in attempts():
        if not key or _is_newer(found, name, incarnation):
            incarnation, own = found.newest.get(name, 0) + 1, uuid.uuid4().bytes
            while not store.create(member_key(name, incarnation, "json"), own):
                incarnation += 1
            key = member_key(name, incarnation, "json")
            # Other bytes must be refused, unless a newer site has removed the object.
            overwrites = store.create(key, uuid.uuid4().bytes)
        keys = store.keys(prefix)
        found = members(keys)
        if key in keys and not _is_newer(found, name, incarnation):
            if overwrites:
                raise RuntimeError(
                    f"The store {store.url} overwrites objects, so two sites could "
                    "both commit a round. Use a store with conditional writes "
                    "(If-None-Match)."
                )
            store.delete([old for old in keys if old != key and members([old]).newest])
            return incarnation
    raise StoreError(
        f"The store {store.url} lists {prefix} without {key}, which was created "
        "before, or other sites join under this name at once. Start this site again."
    )


def _is_newer(found: Members, name: str, incarnation: int) -> bool:
    """Whether a listing has a newer site of this name, or one that left as this."""
    newest = found.newest.get(name, 0)
    return newest > incarnation or (newest == incarnation and name in found.left)


def renew(store: Store, name: str, incarnation: int) -> None:
    """Gives a member's object another version, for the others to see."""
    store.replace(member_key(name, incarnation, "json"), uuid.uuid4().bytes)


def versions(store: Store) -> dict[str, tuple[int, str]]:
    """Of each member, how often it has joined, and the version of its object."""
    found = store.versions(MEMBERS)
    newest = members(found).newest.items()
    keys = {name: (n, member_key(name, n, "json")) for name, n in newest}
    return {name: (n, found[key]) for name, (n, key) in keys.items() if key in found}


def remove_members(
    store: Store, found: Members, gone: Iterable[str], kept: int
) -> None:
    """Removes the objects of members that are gone, but for some."""
    for name in sorted(gone)[max(kept, _KEPT_MEMBERS) :][:_REMOVED]:
        kind = "left" if name in found.left else "json"
        store.delete([member_key(name, found.newest[name], kind)])


def leave(store: Store, name: str, incarnation: int, has_contributed: bool) -> None:
    """The other sites do not wait for this one any more.

    One that never contributed, such as an evaluation, leaves no trace: a quorum counts
    sites that have left, and it would take the place of one that has yet to come.
    """
    if has_contributed or incarnation > 1:
        store.create(member_key(name, incarnation, "left"), b"{}")
    store.delete([member_key(name, incarnation, "json")])


def _judged(
    received: Iterable[Received], before: str, awaited: Roster
) -> list[Received]:
    """The contributions, each with the reason why it cannot count, if there is one."""
    readable = [x for x in received if not x.why]
    fine = [x for x in readable if x.header["before"] == before]
    # A site that was late for many rounds has gone as much further, and so has one that
    # has trained on while the others were away: by more tokens than usual.
    usual = _median(x.header["tokens"] for x in fine)
    paces = {}
    for x in readable:
        _, own = awaited.get(x.name, (0, usual))
        times = x.header["tokens"] / max(own, usual)
        # Both numbers are the site's own word, so they excuse a bounded length alone.
        rounds = min(max(x.header["rounds"], times), _MOST_ROUNDS)
        paces[x.name] = x.norm / rounds
    # With two contributions nobody can tell which of them is wrong.
    median = _median(paces[x.name] for x in fine)
    most = MAX_NORM * median if len(fine) >= 3 and median > 0 else math.inf
    judged = []
    for each in received:
        why = each.why
        if not why and (other := each.header["before"]) != before:
            why = f"It is measured from other outer parameters, {other!r:.40}."
        elif not why and (pace := paces[each.name]) > most:
            norms = f"{pace:.3g}, is beyond {MAX_NORM:g} times the median"
            why = f"Its norm per round, {norms}, {median:.3g}."
        judged.append(each._replace(why=why))
    return judged


def _median(values: Iterable[float]) -> float:
    return statistics.median_high([*values] or [1.0])


def commit(
    number: int, before: str, received: Sequence[Received], awaited: Roster, needed: int
) -> dict[str, Any]:
    """The commit of a round: which contributions count, and how much.

    A site's share of the mean is its tokens per round over those of all expected sites,
    which are bounded (see `largest_rate`). An absent site contributes its drift later,
    with the same share, so nothing counts twice. Weights are in units of the mean
    share.

    With fewer contributions than are needed none counts. The round then ends for
    rejected sites, and the others contribute the same to the next one.
    """
    received = _judged(received, before, awaited)
    valid = [each for each in received if not each.why]
    valid = valid if len(valid) >= needed else []
    own = {x.name: x.header["tokens"] / x.header["rounds"] for x in valid}
    roster = {**awaited, **{name: [number, rate] for name, rate in own.items()}}
    most = _headers.largest_rate(rate for _, rate in roster.values())
    roster = {name: [last, min(rate, most)] for name, (last, rate) in roster.items()}
    mean = math.fsum(rate for _, rate in roster.values()) / max(1, len(roster))
    return {
        "before": before,
        "contributors": [
            {
                "name": x.name,
                "uid": x.header["uid"],
                "sha256": x.header["sha256"],
                "tokens": x.header["tokens"],
                "weight": roster[x.name][1] / mean,
            }
            for x in valid
        ],
        "rejected": [
            {"name": x.name, "uid": x.header.get("uid"), "why": x.why[:300]}
            for x in received
            if x.why
        ],
        "roster": roster,
    }


def read_commit(store: Store, number: int) -> dict[str, Any] | None:
    """The commit of a round, if there is one."""
    key = commit_key(number)
    if (found := store.read(key)) is None:
        return None
    _headers.check_commit(key, found[0], number)
    return found[0]


def load(
    store: Store, model: Model, least: int = 0
) -> tuple[Outer, Roster, int] | None:
    """The newest outer side that can be read, its roster, and the next round's number.

    None if there is none before round `least` or later. A snapshot is used if the
    commit after it, or what has been contributed to that round, confirms its digest;
    else an older one. However many cannot be used, they cost the pauses between looks
    once.
    """
    faults: dict[int, InvalidError] = {}
    for _ in attempts():
        for number in _snapshots(store):  # a first listing may be too old for any
            if number < least:
                break
            try:
                outer, roster = _confirmed(store, model, number)
            except InvalidError as error:
                faults[number] = error
                continue
            for newer in faults.keys() - range(number + 1):
                log.warning("A snapshot is not used: %s", faults[newer])
            return outer, roster, number
    for error in faults.values():
        log.warning("A snapshot is not used: %s", error)
    return None


def _confirmed(store: Store, model: Model, number: int) -> tuple[Outer, Roster]:
    """A snapshot that the round after it confirms, and its roster."""
    key, commit_at = snapshot_key(number), commit_key(number)
    found, commit = store.look(key, model.outer_step.snapshot), store.look(commit_at)
    if found is None:
        raise InvalidError(f"{key} is missing.")
    header, arrays = found
    _headers.check_snapshot(key, header, number)
    outer = model.outer_step.from_snapshot(arrays)
    if commit is not None:
        _headers.check_commit(commit_at, commit[0], number)
        digests = {commit[0]["before"]}
    elif number == 0:  # A run begins with it.
        digests = {outer.digest}
    else:
        digests = _digests(store, number)
    if digests != {outer.digest}:
        raise InvalidError(f"The round after {key} does not confirm it.")
    return outer, header["roster"]


def _digests(store: Store, number: int) -> set[Any]:
    """Digests of the outer sides from which the contributions to a round come."""
    found: set[Any] = set()
    for key in store.keys(contribution_key(number, "")):
        with suppress(InvalidError):
            if (header := store.header(key)) is not None:
                found.add(str(header.get("before")))
    return found


def write_snapshot(store: Store, outer: Outer, roster: Roster, number: int) -> None:
    """Writes the outer side before a round, and collects what older rounds left."""
    numbers = _snapshots(store)
    if number in numbers and _has_body(store, number):
        return
    arrays = to_host([*outer.anchor, *outer.state])
    store.write(snapshot_key(number), {"roster": roster}, arrays)
    kept = [number, *(each for each in numbers if each < number)][:_KEPT]
    if len(kept) == _KEPT:
        _collect(store, kept[-1])


def has_lost(store: Store, number: int) -> bool:
    """Whether the newest snapshot, or what counted since, is not all there any more."""
    newest = max(_snapshots(store), default=0)
    if not _has_body(store, newest):
        return True
    there = {*store.keys("rounds/"), *store.keys("bodies/rounds/")}
    for each in range(newest, number):
        try:
            commit = read_commit(store, each)
        except InvalidError:
            return True
        for entry in commit["contributors"] if commit else ():
            key = contribution_key(each, entry["name"])
            if not {key, f"bodies/{key}/{entry['sha256']}"} <= there:
                return True
    return False


def _has_body(store: Store, number: int) -> bool:
    """Whether a snapshot's arrays are there."""
    return bool(store.keys(f"bodies/{snapshot_key(number)}/"))


def _collect(store: Store, before: int) -> None:
    """Removes contributions and snapshots of rounds before one."""
    for prefix in (SNAPSHOTS, "rounds/", "bodies/"):
        store.delete([key for n, key in _numbered(store, prefix) if n < before])


def _numbered(store: Store, prefix: str) -> list[tuple[int, str]]:
    """Keys below a prefix with their rounds, without those that are not a run's."""
    found = map(_NUMBERED.fullmatch, store.keys(prefix))
    return [(int(match[1]), match[0]) for match in found if match]


def _snapshots(store: Store) -> list[int]:
    """Numbers of the rounds before which there is a snapshot, the newest first."""
    return sorted({number for number, _ in _numbered(store, SNAPSHOTS)}, reverse=True)
