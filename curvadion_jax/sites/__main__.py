"""Shows a run: ``python -m curvadion_jax.sites status s3://bucket/run-7``.

It takes no part in the run. Text that others have written is shown quoted.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from curvadion_jax.sites import _run
from curvadion_jax.sites._store import RunError, Store

# Rounds that are shown.
RECENT = 20


def status(url: Any) -> str:
    """The rounds, sites and rejections of a run, as text."""
    store = Store(url, make=False)
    if (run := store.read(_run.RUN)) is None:
        raise ValueError(f"There is no run at {store.url}.")
    store.run = run[0]["sha256"]
    keys, strays = store.find("")
    members = _run.members(keys)
    # Commits follow each other: one far ahead is not the run's.
    number = next(n for n in itertools.count() if _run.commit_key(n) not in keys)
    notes, last, counts = [], dict[str, str](), Counter[str]()
    for each in range(max(number - RECENT, 0), number):
        try:
            commit = (store.read(_run.commit_key(each)) or ({},))[0]
            for entry in commit["contributors"]:
                counts[entry["name"]] += 1
                last[entry["name"]] = f"{each:8} {entry['weight']:6.2f}"
            for entry in commit["rejected"]:
                what = f"round {each}: the contribution of {entry['name']!r}"
                notes.append(f"{what} does not count: {entry['why']!r}")
        except (RunError, KeyError, TypeError, ValueError) as error:
            notes.append(f"round {each} cannot be shown: {error!r}")
    for key in keys - {_run.RUN}:
        strays += _run.number_of(key) is None and not _run.members([key]).newest
    notes += [f"{strays} objects are not the run's"] if strays else []
    lines = [
        f"{store.url}: {number} rounds, quorum {run[0]['quorum'][0]!r}",
        f"{'site':16} state {f'of the last {RECENT}':>15} {'last in':>8} weight",
    ]
    for name in sorted(members.newest):
        sent = _run.contribution_key(number, name) in keys
        state = "left" if name in members.left else "sent" if sent else "-"
        row = f"{name:16} {state:5} {counts[name]:15}"
        lines.append(f"{row} {last.get(name, '-'):>8}")
    return "\n".join(lines + notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m curvadion_jax.sites", description="Looks at a run of sites."
    )
    parser.add_argument("command", choices=["status"])
    parser.add_argument("url", help="of the run, as given to sites.Site")
    try:
        print(status(parser.parse_args(arguments).url))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
