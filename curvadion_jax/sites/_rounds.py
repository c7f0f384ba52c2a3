"""A round: who has posted, when it is committed, with what weights. Pure decisions.

All of them are one site's own, made with its own clock and taken down in the commit,
which all follow; so no two need to decide alike, and no clock of another counts.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from curvadion_jax.sites import _messages
from curvadion_jax.sites._messages import Refused

# Rounds without a contribution, after which nobody waits for a site and its share of
# the mean is the others'.
FORGET = 4

# Why a contribution that was collected cannot count.
GONE = "it is gone"

RUN = "run.json"
SNAPSHOTS = "snapshots/"
COMMITS = "commits/"
MEMBERS = "members/"
ROUNDS = "rounds/"


def post_key(number: int, name: str = "") -> str:
    return f"{ROUNDS}{number:08d}/{name}"


def commit_key(number: int) -> str:
    return f"{COMMITS}{number:08d}.json"


def snapshot_key(number: int) -> str:
    return f"{SNAPSHOTS}{number:08d}"


def member_key(name: str, incarnation: int, suffix: str = "json") -> str:
    return f"{MEMBERS}{name}/{incarnation:06d}.{suffix}"


# name -> the last round in which it counted, and its tokens a round.
Roster = Mapping[str, Sequence[float]]


class Post(NamedTuple):
    """A contribution as it was read, by whoever may propose the commit.

    Attributes:
      name: of the site.
      header: of the message; empty if it could not be read.
      arrays: of the message.
      norm: of what it stands for.
      why: why it cannot count; empty if it can.
    """

    name: str
    header: dict[str, Any] = {}  # noqa: RUF012
    arrays: Any = ()
    norm: float = math.nan
    why: str = ""


class Own(NamedTuple):
    """What this site brings to a round.

    Attributes:
      fragment: of the parameters.
      captured: the fragment's parameters when it was due.
      anchor: the fragment's anchor then, of which the site knew.
      drift: how far they were from it.
      message, left: what stands for it, and what is owed when that is counted.
      tokens: seen since the last contribution to the fragment.
      uid: of the message.
      round: to which it is posted, or may be: an answer may be lost; -1 before.
      posted: whether it is there, or one of another who had this name.
      created: whether it is this one.
    """

    fragment: int
    captured: list[np.ndarray]
    anchor: list[np.ndarray]
    drift: list[np.ndarray]
    message: list[np.ndarray]
    left: list[np.ndarray]
    tokens: float
    uid: str
    round: int = -1
    posted: bool = False
    created: bool = False


class Members(NamedTuple):
    """Who has ever joined: name -> newest incarnation, and who of them has left."""

    newest: dict[str, int]
    gone: frozenset[str]

    def needed(self, quorum: int) -> int:
        """The posts that a round needs; fewer once sites have left for good."""
        if len(self.newest) < quorum:
            return quorum
        return max(1, min(quorum, len(self.newest) - len(self.gone)))


def members(keys: Iterable[str]) -> Members:
    """From the keys below `MEMBERS`.

    Example:
      >>> found = members(["members/a/000001.json", "members/a/000001.left",
      ...                  "members/b/000001.json", "members/b/000002.json"])
      >>> found.newest, sorted(found.gone), found.needed(quorum=2)
      ({'a': 1, 'b': 2}, ['a'], 1)
    """
    newest, left = {}, {}
    for key in keys:
        name, _, file = key.removeprefix(MEMBERS).partition("/")
        number, _, suffix = file.partition(".")
        if number.isdecimal():
            found = left if suffix == "left" else newest
            found[name] = max(found.get(name, 0), int(number))
    gone = {name for name, last in newest.items() if left.get(name, 0) >= last}
    return Members(newest, frozenset(gone))


def digest_of_most(posts: Iterable[Post], own: str) -> str:
    """The anchor that most of the readable contributions are measured from."""
    found = Counter(post.header["before"] for post in posts if not post.why)
    if not found:
        return own
    most = max(found.values())
    likely = sorted(digest for digest, count in found.items() if count == most)
    return own if own in likely else likely[0]


def check_post(header: Mapping[str, Any], name: str, number: int) -> None:
    """Rejects a contribution that says something else than where it lies."""
    for field, wanted in (("name", name), ("round", number)):
        if header.get(field) != wanted:
            raise Refused(f"its {field} is {header.get(field)!r}")
    for field, kind, least in (("tokens", int | float, 0), ("rounds", int, 1)):
        x = header.get(field)
        if x is None or isinstance(x, bool) or not isinstance(x, kind):
            raise Refused(f"its {field} is {x!r}")
        if not least <= x < 1e18 or not x:
            raise Refused(f"its {field} is {x}")
    if not isinstance(header.get("before"), str):
        raise Refused("it does not say which model it is measured from")


def judged(posts: Sequence[Post], before: str, max_norm: float) -> list[Post]:
    """The contributions, with why those that cannot count cannot.

    Example:
      >>> posts = [Post(name, {"before": "x"}, (), norm)
      ...          for name, norm in zip("abcd", (1.0, 1.5, 40.0, math.nan))]
      >>> for post in judged(posts, before="x", max_norm=10):
      ...     print(f"{post.name}: {post.why or None}")
      a: None
      b: None
      c: its norm, 40, is beyond 10 times the median, 1.5
      d: it is not finite
    """
    whys = [post.why or _fault(post, before) for post in posts]
    norms = sorted(post.norm for post, why in zip(posts, whys, strict=True) if not why)
    # Of two nobody can tell which is wrong.
    median = norms[len(norms) // 2] if len(norms) >= 3 else math.inf
    found = []
    for post, why in zip(posts, whys, strict=True):
        if not why and post.norm > max_norm * median > 0:
            many = f"{max_norm:g} times the median, {median:.3g}"
            why = f"its norm, {post.norm:.3g}, is beyond {many}"
        found.append(post._replace(why=why))
    return found


def _fault(post: Post, before: str) -> str:
    if (other := post.header["before"]) != before:
        return f"it is measured from other outer parameters ({other})"
    return "" if math.isfinite(post.norm) else "it is not finite"


def commit(
    number: int,
    fragment: int,
    before: str,
    posts: Sequence[Post],
    roster: Roster,
    gone: Iterable[str],
    by: str,
) -> bytes:
    """The commit of a round: who counts in it, and how much.

    A site's share of the mean is its tokens a round over those of all who are expected:
    who contributed in the last rounds and has not left. Whoever is absent brings its
    drift later, at that share; so nothing counts twice, and nothing is lost. Weights
    are in units of the mean share, and add up to the number of the expected if all are
    there.

    Args:
      number, fragment: of the round.
      before: digest of the anchor.
      posts: as `judged`.
      roster: before the round.
      gone: who has left.
      by: who proposes it.
    """
    counted = sorted((p for p in posts if not p.why), key=lambda post: post.name)
    rates = {
        name: rate
        for name, (last, rate) in roster.items()
        if number - last <= FORGET and name not in set(gone)
    }
    new = {p.name: p.header["tokens"] / p.header["rounds"] for p in counted}
    rates |= new
    unit = math.fsum(rates.values())
    kept = {name: [*pair] for name, pair in roster.items() if name in rates}
    kept |= {name: [number, rate] for name, rate in new.items()}
    found = {
        "format": _messages.FORMAT,
        "round": number,
        "fragment": fragment,
        "before": before,
        "expected": len(rates),
        "contributors": [
            {
                "name": p.name,
                "uid": p.header["uid"],
                "sha256": p.header["sha256"],
                "tokens": p.header["tokens"],
                "weight": new[p.name] * len(rates) / unit,
            }
            for p in counted
        ],
        "rejected": [
            {"name": p.name, "uid": p.header.get("uid"), "why": p.why[:300]}
            for p in posts
            if p.why
        ],
        "roster": kept,
        "by": by,
    }
    return json.dumps(found).encode()


def read_commit(data: bytes, number: int) -> dict[str, Any]:
    """A commit, or :class:`Refused`."""
    found = _messages.as_object(data)
    _messages.check_format(found, f"commit {number}")
    fields = ("round", "before", "expected", "contributors", "rejected", "roster")
    if found.get("round") != number or any(name not in found for name in fields):
        raise Refused(f"commit {number} is damaged")
    return found
