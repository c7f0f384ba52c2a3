"""Train the study's rows again, and say whether they end where the committed ones did.

    python benchmarks/study/reproduce.py --workers 2   # an hour of two cores; resumes
    python benchmarks/study/reproduce.py --table       # what there is so far
    python benchmarks/study/reproduce.py --only "*local_muon*"

Every method of the study's table trains for 260 steps on seed 0 with its learning rate,
on the same text, which is downloaded if it is missing. A line for each goes to
`reproduced.jsonl` beside this file, which git ignores. The command prints each beside
the committed row, and fails if one disagrees.

Losses agree within half a percent: ten runs trained on both an H100 and a CPU differ by
up to 0.2%, and three trained twice on the H100 by up to 0.3%. Bytes agree within 5%:
syncs that a measurement triggers come a few times more or less.
"""

import argparse
import fnmatch
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import measuring
import rows
import study
import table
from simulate import Run

FILE = Path(__file__).with_name("reproduced.jsonl")
SEED = 0
LOSS_TOLERANCE, BYTES_TOLERANCE = 0.005, 0.05
# Rows that today's code should not repeat, and why.
CHANGED = {rows.CURVADION: "its threshold has another control law since"}
HEADER = ("method", "loss", "here", "difference", "bytes", "here", "agrees")


def runs(results: study.Results, pattern: str = "*") -> list[Run]:
    """The committed runs that can be trained again, the table's order."""
    found = {
        method: Run(
            method, study.best_rate(results, method) or 0.0, SEED, study.QUARTER
        )
        for method in rows.METHODS
        if fnmatch.fnmatchcase(method, pattern)
    }
    return [run for run in found.values() if run in results]


def disagreement(committed: dict[str, Any], again: dict[str, Any]) -> str:
    """What two rows of a run disagree in; nothing where they agree."""
    if committed["text"] != again["text"]:
        return "another text"
    loss, sent = (again[key] / committed[key] - 1 for key in ("loss", "bytes"))
    parts = {
        "loss": not abs(loss) <= LOSS_TOLERANCE,  # NaN disagrees
        "bytes": abs(sent) > BYTES_TOLERANCE,
    }
    return " and ".join(part for part, is_off in parts.items() if is_off)


def lines(results: study.Results, again: study.Results) -> Iterator[tuple[str, ...]]:
    """The cells of the table, of what has been trained again."""
    for run in runs(results):
        if run not in again:
            continue
        pair = results[run], again[run]
        sent = (f"{table.share_of_bytes(row, run.steps):.2%}" for row in pair)
        differs = disagreement(*pair)
        if run.method in CHANGED:
            agrees = f"not compared: {CHANGED[run.method]}"
        else:
            agrees = f"no: {differs}" if differs else "yes"
        losses = [row["loss"] for row in pair]
        yield (
            *(run.method, *(f"{loss:.4f}" for loss in losses)),
            *(f"{losses[1] / losses[0] - 1:+.2%}", *sent, agrees),
        )


def train(results: study.Results, pattern: str, workers: int) -> None:
    """Trains what is missing."""
    if not corpus.TEXT.exists():
        corpus.download([corpus.PACKAGES], corpus.TEXT)
    missing = [run for run in runs(results, pattern) if run not in study.read(FILE)]
    for row in study.trained(missing, workers):
        study.keep(FILE, row)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="*", help="methods of this pattern")
    parser.add_argument("--table", action="store_true", help="print it, train nothing")
    options = parser.parse_args()
    results = study.read()
    if not options.table:
        train(results, options.only, options.workers)
    found = [*lines(results, study.read(FILE))]
    measuring.table(HEADER, found)
    differ = [cells[0] for cells in found if cells[-1].startswith("no:")]
    print(f"\n{len(found)} rows trained again; {len(differ)} disagree.")
    if differ:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
