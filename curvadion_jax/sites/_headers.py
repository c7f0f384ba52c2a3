"""What headers must have: that their digest is right says nothing of their fields.

Whoever may write into the store can write a header with a digest. One whose fields
would stop a site with an error of Python, or make its arithmetic infinite, is invalid.
"""

import re
from collections.abc import Mapping
from typing import Any

from curvadion_jax.sites._store import InvalidError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# Tokens, their rates and weights, all of which are far smaller.
_MOST = 1e18
# Characters of a contribution's id, which commits repeat.
_UID = 64


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


def check_commit(key: str, header: Mapping[str, Any]) -> None:
    roster, wrong = header.get("roster"), []
    if not isinstance(header.get("before"), str):
        wrong.append("before")
    if not _is_roster(roster):
        wrong.append("roster")
    elif not _all(
        header.get("contributors"), lambda x: _is_contributor(x) and x["name"] in roster
    ):
        wrong.append("contributors")
    if not _all(header.get("rejected"), _is_rejected):
        wrong.append("rejected")
    _raise_if(wrong, key)


def check_snapshot(key: str, header: Mapping[str, Any]) -> None:
    _raise_if([] if _is_roster(header.get("roster")) else ["roster"], key)


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


def _is_roster(x: Any) -> bool:
    if not isinstance(x, dict) or not all(map(_is_name, x)):
        return False
    return _all([*x.values()], _is_place)


def _is_place(x: Any) -> bool:
    match x:
        case [int(), int() | float() as rate]:
            return 0 <= rate < _MOST
    return False


def _is_contributor(x: Any) -> bool:
    match x:
        case {
            "name": name,
            "uid": str(),
            "sha256": str(),
            "weight": int() | float() as weight,
        }:
            return _is_name(name) and 0 <= weight < _MOST
    return False


def _is_rejected(x: Any) -> bool:
    match x:
        case {"name": str(), "uid": str() | None, "why": str()}:
            return True
    return False
