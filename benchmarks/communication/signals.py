r"""Which signal predicts what a sync brings: measure it, then the table and picture.

    XLA_FLAGS=--xla_cpu_multi_thread_eigen=false \
        python benchmarks/communication/signals.py --size cpu

Rows go to `rows.jsonl` in `signals/cpu` beside this file (or in another size's), one a
sync, as they come. What is there is not measured again, so a measurement that was
stopped goes on with the same command, and once all is there it makes the table and the
picture anew.
"""

import argparse
import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import study
from runs import Run
from sizes import SIZES, Size

RESULTS = Path(__file__).with_suffix("")
OUTERS = ("nesterov 0.7 0.6", "orthonormal 0.7 0.6")
RUN = Run(
    "dion 1.0",
    0.04,
    trigger="random 4 28",
    sync="reconcile",
    compressor="int 4",
    steps=300,
)


def read(file: Path) -> list[dict[str, Any]]:
    """The rows so far; a line cut off by a kill is left out."""
    return [json.loads(line) for line in study.whole_lines(file)]


def train(runs: Sequence[Run], size: Size, file: Path) -> None:
    """Measures what is missing, run by run."""
    import branches
    import texts

    corpus = texts.load(size.data)
    size = dataclasses.replace(size, evaluation=256)
    rows, programs = read(file), {}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with file.open("a") as journal:
        for run in runs:
            done = {row["step"] for row in rows if Run(**row["run"]) == run}
            if done.issuperset(branches.moments(run)[:-1]):
                continue
            key = run.but(seed=0)
            if key not in programs:
                programs[key] = branches.Replicas(run, size, corpus)
            for row in branches.measure(programs[key], run.seed, done):
                row |= {"made": datetime.date.today().isoformat(), **_hardware()}
                journal.write(json.dumps(_short(row)) + "\n")
                journal.flush()
                print(f"{run.outer}, seed {run.seed}, step {row['step']}", flush=True)


def _hardware() -> dict[str, str]:
    import jax

    return {"on": f"{os.cpu_count()} CPU cores, JAX {jax.__version__}"}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Eight digits of every measured number are enough."""
    short = lambda x: float(f"{x:.8g}") if isinstance(x, float) else x  # noqa: E731
    return {name: short(value) for name, value in row.items()}


def report(folder: Path) -> str:
    """Writes the picture and the table of the rows in a folder; returns the table."""
    rows = read(folder / "rows.jsonl")
    table = ranks.columns(rows)
    found = ranks.intervals(table)
    ranks.draw(table, found, folder / "picture.png")
    made = sorted({f"{row['made']}, {row['on']}" for row in rows})
    runs = len(set(table["run"]))
    lines = [f"{len(rows)} syncs in {runs} runs; {'; '.join(made)}.", ""]
    lines += [_spread(rows, table, what) for what in ("benefit", "averaging", "outer")]
    text = "\n".join([*lines, "", ranks.markdown(table, found), ""])
    (folder / "table.md").write_text(text)
    return text


def _spread(rows: list[dict[str, Any]], table: ranks.Columns, what: str) -> str:
    """Median and quartiles in thousandths of a nat, for every outer step."""
    parts, outers = [], sorted({row["run"]["outer"] for row in rows})
    for number, outer in enumerate(outers):
        values = 1000 * table[what][table["group"] == number]
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        parts.append(f"{outer} {middle:+.1f} ({low:+.1f} to {high:+.1f})")
    return f"- {what}: {'; '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=RUN.steps)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    runs = [
        RUN.but(outer=outer, seed=seed, steps=options.steps)
        for seed in range(options.seeds)
        for outer in OUTERS
    ]
    folder = options.results / options.size
    folder.mkdir(parents=True, exist_ok=True)
    train(runs, SIZES[options.size], folder / "rows.jsonl")
    print(report(folder))


if __name__ == "__main__":
    main()
