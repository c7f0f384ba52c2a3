"""Low-communication training over slow and lossy links, in network namespaces.

    sudo "$(which python)" benchmarks/wan/measure.py         # what is missing
    sudo "$(which python)" benchmarks/wan/measure.py links   # one plan of it
    python benchmarks/wan/measure.py --table                 # Markdown and the picture

Two processes, each with one replica on a core of its own, each in a network namespace,
train the example's model over a link that is made for them and removed again. Results
go to `results.jsonl` beside this file, a line a case; what is in it is not measured
again. Tables and picture go to `results.md` and `results.png`. README.md in the folder
above says what is measured, and how.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import grid
import launching
import namespaces
import wan_picture
import wan_tables
from grid import Case, Record

RESULTS = Path(__file__).with_name("results.jsonl")


def _about() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "optax")}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions,
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}",
    }


def read_results(file: Path) -> dict[str, Record]:
    """The results so far, by the key of their case."""
    return {Case(**row["case"]).key(): row for row in launching.read(file)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="*", help=f"of {', '.join(grid.PLANS)}")
    parser.add_argument("--links", nargs="*", help="names of links, as in the tables")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="write tables and picture")
    options = parser.parse_args(arguments)
    if unknown := set(options.plans) - set(grid.PLANS):
        parser.error(f"unknown plans: {unknown}; there are {', '.join(grid.PLANS)}")
    if options.table:
        results = read_results(options.results)
        text = wan_tables.document(results)
        options.results.with_suffix(".md").write_text(text)
        print(text)
        wan_picture.draw(results, options.results.with_suffix(".png"))
        return 0
    if refusal := namespaces.refusal():
        print(refusal, file=sys.stderr)
        return 1
    wanted = [x for plan in options.plans or grid.PLANS for x in grid.PLANS[plan]]
    if options.links is not None:
        wanted = [x for x in wanted if x.kind != "link" or x.name in options.links]
    # Being told to stop cleans up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        # The same programs over every link.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
        try:
            _measure(wanted, options.results)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from there", file=sys.stderr)
            return 130
    return 0


def _measure(wanted: list[Case], file: Path) -> None:
    whole = "".join(json.dumps(row) + "\n" for row in launching.read(file))
    file.write_text(whole)  # without a line that was cut off
    for case in wanted:
        if case.key() in read_results(file):
            continue
        print(case, end=": ", flush=True)
        began = time.monotonic()
        record = {
            "case": dataclasses.asdict(case),
            **_about(),
            **cases.KINDS[case.kind](case),
        }
        with file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
