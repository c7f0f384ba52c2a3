"""Shows a run: ``python -m curvadion_jax.sites status s3://bucket/run-7 --watch``."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from curvadion_jax.sites import _status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m curvadion_jax.sites", description="Looks at a run of sites."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="rounds, sites, weights, tokens, bytes")
    status.add_argument("url", help="of the run, as given to sites.join")
    status.add_argument(
        *("--watch",),
        **{"type": float, "nargs": "?", "const": 10.0, "metavar": "SECONDS"},
        help="again every so many seconds (default: %(const)s)",
    )
    status.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw all rounds over time"
    )
    flags = parser.parse_args(arguments)
    try:
        while True:
            found = _status.read(flags.url, None if flags.picture else _status.RECENT)
            recent = found._replace(rounds=found.rounds[-_status.RECENT :])
            print(_status.table(recent), flush=True)
            if flags.picture and found.rounds:
                _status.draw(found.rounds, flags.picture)
                print(flags.picture)
            if flags.watch is None:
                return 0
            time.sleep(flags.watch)
            print()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
