"""Shows a run: ``python -m curvadion_jax.sites status s3://bucket/run-7``.

It takes no part in the run. Times are the store's, at which it made the objects; what
others have written into them is shown quoted.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from curvadion_jax.sites import _rounds, _run, _store
from curvadion_jax.sites._store import RunError, Store

# Rounds that are shown, and over which rates are taken.
RECENT = 20


def status(url: Any) -> str:
    """A run and its sites, as text.

    Raises:
      ValueError: if there is none.
      RuntimeError: if it is of another format.
      OSError: if the store cannot be read.
    """
    store = Store(url, make=False)
    if (run := _run.read(store)) is None:
        raise ValueError(f"There is no run at {store.url}.")
    found, strays = store.objects("")
    keys = [meta["path"] for meta in found]
    strays += len(keys) - sum(map(_rounds.is_known, keys))
    members = _rounds.members(keys)
    times = {meta["path"]: meta["last_modified"] for meta in found}
    # Commits follow each other: one far ahead is nobody's.
    number = next(n for n in itertools.count() if _rounds.commit_key(n) not in times)
    sent = {name: _rounds.contribution_key(number, name) for name in members.newest}
    waiting = sorted(name for name, key in sent.items() if key in times)
    commits, notes = {}, [f"{strays} objects are not the run's"] if strays else []
    for each in range(max(number - RECENT, 0), number):
        try:
            data = store.get(_rounds.commit_key(each), _store.HEADER, exists=True)
            commits[each] = commit = _rounds.read_commit(data or b"", each)
            notes += [
                f"round {each}: the contribution of {entry['name']!r} is not counted: "
                f"{entry['why']!r}"
                for entry in commit["rejected"]
            ]
        except RunError as error:
            notes.append(str(error))
    lines = [
        f"{store.url}: {number} rounds, quorum {run['quorum'][0]}",
        f"contributed to round {number}: {', '.join(waiting) or 'nobody'}",
        f"{'site':16} {'state':8} {f'of the last {len(commits)}':>15} {'last in':>8} "
        f"{'weight':>6} {'tokens/s':>10}",
    ]
    at = [times[_rounds.commit_key(each)] for each in commits]
    seconds = (at[-1] - at[0]).total_seconds() if at else 0
    for name in sorted(members.newest):
        own = {
            each: entry
            for each, commit in commits.items()
            for entry in commit["contributors"]
            if entry["name"] == name
        }
        last = max(own, default=None)
        recent = last is not None and number - 1 - last <= _rounds.FORGET
        state = "here" if recent or name in waiting else "silent"
        weight = "-" if last is None else f"{own[last]['weight']:.2f}"
        # The first round's tokens were seen before the time began.
        tokens = sum(own[each]["tokens"] for each in own if each > min(commits))
        lines.append(
            f"{name:16} {'left' if name in members.left else state:8} {len(own):>15} "
            f"{'-' if last is None else last:>8} "
            f"{weight:>6} "
            f"{f'{tokens / seconds:,.0f}' if seconds else '-':>10}"
        )
    return "\n".join(lines + notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m curvadion_jax.sites", description="Looks at a run of sites."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("status", help="rounds, sites, weights, tokens")
    command.add_argument("url", help="of the run, as given to sites.join")
    try:
        print(status(parser.parse_args(arguments).url))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
