"""What headers must have: that their digest is right says nothing of their fields.

Whoever may write into the store can write a header with a digest. One whose fields
would stop a site with an error of Python, or make its arithmetic infinite, is invalid.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from curvadion_jax.sites._store import InvalidError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# Tokens and their rates, all of which are far from these.
_LEAST, _MOST = 1e-18, 1e18
# Characters of a contribution's id, which commits repeat.
_UID = 64
# In a roster of three or more, a site's tokens per round count at most so many times
# the median. Without a bound, one number would take the whole mean.
_MOST_RATE = 1000.0


def largest_rate(rates: Iterable[float]) -> float:
    """The largest number of tokens per round that a roster may have.

    Example:
      >>> largest_rate([1.0, 2.0, 1e15]), largest_rate([1.0, 1e15])
      (2000.0, inf)
    """
    rates = [*rates]
    if len(rates) < 3:  # Nobody can tell which of two is wrong.
        return math.inf
    return _MOST_RATE * statistics.median_low(rates)


def check_contribution(header: Mapping[str, Any]) -> None:
    match header:
        case {
            "tokens": int() | float() as tokens,
            "rounds": int() as rounds,
            "before": str(),
            "uid": str() as uid,
        } if 1e-9 <= tokens < _MOST and 1 <= rounds < 10**9 and len(uid) <= _UID:
            return
    raise InvalidError("It has no usable tokens, rounds, digest and name.")


def check_commit(key: str, header: Mapping[str, Any], number: int) -> None:
    roster: Any = header.get("roster")
    wrong = []
    if not isinstance(header.get("before"), str):
        wrong.append("before")
    if not _is_roster(roster, number):
        wrong.append("roster")
    elif not _all(header.get("contributors"), lambda x: _is_contributor(x, roster)):
        wrong.append("contributors")
    if not _all(header.get("rejected"), _is_rejected):
        wrong.append("rejected")
    _raise_if(wrong, key)


def check_snapshot(key: str, header: Mapping[str, Any], number: int) -> None:
    usable = _is_roster(header.get("roster"), number - 1)
    _raise_if([] if usable else ["roster"], key)


def _raise_if(wrong: list[str], key: str) -> None:
    if wrong:
        raise InvalidError(
            f"{key} has no usable {', '.join(wrong)}, and was not written by this "
            "version. Restore the object, or begin a run at another URL."
        )


def _all(entries: Any, is_usable: Any) -> bool:
    return isinstance(entries, list) and all(map(is_usable, entries))


def _is_name(x: Any) -> bool:
    return isinstance(x, str) and NAME.fullmatch(x) is not None


def _is_roster(x: Any, number: int) -> bool:
    """Whether it is one after a round: it knows no later round."""
    if not isinstance(x, dict) or not all(map(_is_name, x)):
        return False
    if not _all([*x.values()], lambda place: _is_place(place, number)):
        return False
    rates = [rate for _, rate in x.values()]
    return max(rates, default=0) <= largest_rate(rates)


def _is_place(x: Any, number: int) -> bool:
    match x:
        case [int() as last, int() | float() as rate]:
            return 0 <= last <= number and _LEAST <= rate < _MOST
    return False


def _is_contributor(x: Any, roster: Mapping[str, Any]) -> bool:
    match x:
        case {
            "name": str() as name,
            "uid": str(),
            "sha256": str(),
            "weight": int() | float() as weight,
        }:
            # In units of the mean share: one site has at most all shares.
            return name in roster and 0 <= weight <= len(roster) * (1 + 1e-9)
    return False


def _is_rejected(x: Any) -> bool:
    match x:
        case {"name": str(), "uid": str() | None, "why": str()}:
            return True
    return False
