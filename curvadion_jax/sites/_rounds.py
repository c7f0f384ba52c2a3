"""A round: whose contributions count, how much, and when it is committed.

Every site decides with its own clock, and the decision is the commit, a small object
that is created once and that all follow. So no two sites need to decide alike.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from curvadion_jax.sites import _store
from curvadion_jax.sites._store import InvalidError

# Rounds without a contribution after which nobody waits for a site, and its share of
# the mean goes to the others.
FORGET = 4
# Why a contribution that has been collected cannot count.
GONE = "it is gone"
RUN, MEMBERS = "run.json", "members/"
ROUNDS, COMMITS, SNAPSHOTS = "rounds/", "commits/", "snapshots/"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MEMBER = re.compile(rf"{MEMBERS}({NAME.pattern})/([0-9]{{6,}})\.(json|left)")
_NUMBERED = re.compile(
    r"(?:parts/)?(?:snapshots|commits|rounds)/([0-9]{8})"
    rf"(?:\.json|/{NAME.pattern}(?:/.*)?)?"
)

# name -> the last round in which the site counted, and its tokens per round.
Roster = Mapping[str, Sequence[float]]


def contribution_key(number: int, name: str = "") -> str:
    return f"{ROUNDS}{number:08d}/{name}"


def commit_key(number: int) -> str:
    return f"{COMMITS}{number:08d}.json"


def snapshot_key(number: int) -> str:
    """Of the outer side before a round."""
    return f"{SNAPSHOTS}{number:08d}"


def member_key(name: str, incarnation: int, suffix: str = "json") -> str:
    return f"{MEMBERS}{name}/{incarnation:06d}.{suffix}"


def number_of(key: str) -> int | None:
    """The round that a key belongs to; None for keys that are not a run's."""
    found = _NUMBERED.fullmatch(key)
    return int(found[1]) if found else None


def is_known(key: str) -> bool:
    """Whether it is the key of an object of a run."""
    known = key == RUN or key.removeprefix("parts/").startswith("initial/")
    return known or bool(_NUMBERED.fullmatch(key) or _MEMBER.fullmatch(key))


class Received(NamedTuple):
    """A contribution as a site that may propose the commit has read it."""

    name: str
    header: dict[str, Any] = {}  # noqa: RUF012
    arrays: Any = ()
    norm: float = math.nan
    why: str = ""  # it cannot count


class Contribution(NamedTuple):
    """What this site contributes to a round."""

    captured: list[np.ndarray]  # the parameters when it was due
    anchor: list[np.ndarray]  # that the site knew then
    drift: list[np.ndarray]
    message: list[np.ndarray]
    residual: list[np.ndarray]  # once it has counted
    tokens: float  # since the last contribution
    uid: str  # by which commits name it
    round: int = -1  # to which it is sent, or may have been: an answer may be lost
    sent: bool = False  # it is there, or another of this site's name
    created: bool = False  # it is there


class Members(NamedTuple):
    """Who has ever joined: name -> newest incarnation, and who of them has left."""

    newest: dict[str, int]
    left: frozenset[str]

    def needed(self, quorum: int) -> int:
        """Contributions that a round needs; fewer once sites have left for good."""
        if len(self.newest) < quorum:
            return quorum
        return max(1, min(quorum, len(self.newest) - len(self.left)))


def members(keys: Iterable[str]) -> Members:
    """From the keys below `MEMBERS`."""
    newest: dict[str, tuple[int, bool]] = {}
    for found in filter(None, map(_MEMBER.fullmatch, keys)):
        own = int(found[2]), found[3] == "left"
        newest[found[1]] = max(newest.get(found[1], own), own)
    left = frozenset(name for name, (_, gone) in newest.items() if gone)
    return Members({name: number for name, (number, _) in newest.items()}, left)


def digest_of_most(received: Iterable[Received], own: str) -> str:
    """The anchor that most of the readable contributions are measured from."""
    found = Counter(each.header["before"] for each in received if not each.why)
    most = max(found.values(), default=0)
    likely = sorted(digest for digest, count in found.items() if count == most)
    return own if own in likely or not likely else likely[0]


def check_contribution(header: Mapping[str, Any], name: str, number: int) -> None:
    """Rejects a contribution that says something else than where it lies."""
    for field, wanted in (("name", name), ("round", number)):
        if header.get(field) != wanted:
            raise InvalidError(f"its {field} is {header.get(field)!r}")
    for field, kind, least in (("tokens", int | float, 0), ("rounds", int, 1)):
        x: Any = header.get(field)
        if not isinstance(x, kind) or x is True or not least <= x < 1e18 or not x:
            raise InvalidError(f"its {field} is {x!r}")
    for field in ("before", "uid"):
        if not isinstance(header.get(field), str):
            raise InvalidError(f"its {field} is {header.get(field)!r}")


def judged(
    received: Sequence[Received], before: str, max_norm: float
) -> list[Received]:
    """The contributions, with why those that cannot count cannot."""

    def fault(each: Received) -> str:
        if each.why or (other := each.header["before"]) == before:
            return each.why or ("" if math.isfinite(each.norm) else "it is not finite")
        return f"it is measured from other outer parameters, {other!r}"

    received = [each._replace(why=fault(each)) for each in received]
    norms = sorted(each.norm for each in received if not each.why)
    # Of two nobody can tell which is wrong.
    median = norms[len(norms) // 2] if len(norms) >= 3 else math.inf
    why = "its norm, {:.3g}, is beyond {:g} times the median, {:.3g}"
    return [
        each._replace(why=why.format(each.norm, max_norm, median))
        if not each.why and each.norm > max_norm * median > 0
        else each
        for each in received
    ]


def commit(
    number: int,
    before: str,
    received: Sequence[Received],
    roster: Roster,
    members: Members,
    quorum: int,
    by: str,
) -> bytes:
    """The commit of a round: whose contributions count in it, and how much.

    A site's share of the mean is its tokens per round over those of all who are
    expected: who contributed in the last rounds and has not left. An absent site
    contributes its drift later, at that share, so nothing counts twice and nothing is
    lost. Weights are in units of the mean share, and add up to the number of expected
    sites if all are there.

    Below the quorum nothing counts, so that the round ends for rejected sites, and the
    others contribute the same to the next one.
    """
    valid = sorted((x for x in received if not x.why), key=lambda each: each.name)
    if len(valid) < members.needed(quorum):
        valid = []
    rates = {
        name: rate
        for name, (last, rate) in roster.items()
        if number - last <= FORGET and name not in members.left
    }
    new = {x.name: x.header["tokens"] / x.header["rounds"] for x in valid}
    rates |= new
    unit = math.fsum(rates.values())
    kept = {name: [*pair] for name, pair in roster.items() if name in rates}
    kept |= {name: [number, rate] for name, rate in new.items()}
    found = {
        "round": number,
        "before": before,
        "expected": len(rates),
        "contributors": [
            {name: x.header[name] for name in ("name", "uid", "sha256", "tokens")}
            | {"weight": new[x.name] * len(rates) / unit}
            for x in valid
        ],
        "rejected": [
            {"name": x.name, "uid": x.header.get("uid"), "why": x.why[:300]}
            for x in received
            if x.why
        ],
        "roster": kept,
        "by": by,
    }
    return _store.seal(found)


def read_commit(data: bytes, number: int) -> dict[str, Any]:
    """A commit; an `InvalidError` if it is damaged, or none."""
    parts = {
        "contributors": {"name", "uid", "sha256", "tokens", "weight"},
        "rejected": {"name", "uid", "why"},
    }
    try:
        found = _store.unseal(data)
        whole = {"before", "expected", "roster"} <= found.keys()
        for part, fields in parts.items():
            whole = whole and all(fields <= entry.keys() for entry in found[part])
        if found["round"] != number or not whole:
            raise InvalidError("it is no commit")
    except (InvalidError, AttributeError, KeyError, TypeError) as error:
        raise InvalidError(f"Commit {number} cannot be used: {error}.") from None
    return found
