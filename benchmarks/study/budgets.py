"""What a budget costs in loss: `local_muon` with other shares of the bytes.

    python benchmarks/study/budgets.py      # 6 runs, an hour of a core; resumes
    python benchmarks/study/budgets.py --table

All else is the study's, the learning rate included, which it found at 1% of the bytes.
One seed. A line for each run goes to `results/budgets.jsonl`; the rows at 1% and of
synchronous Muon are the study's.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import rows
import study
from simulate import Run
from table import steps_to

import curvadion_jax as cd

FILE = study.RESULTS / "budgets.jsonl"
SEED = 0
# Steps, and the budgets after so many: 0.001 is a sync every 70 steps, 0.07 every step.
RUNS = {
    study.QUARTER: (0.003, 0.03, 0.07),
    study.STEPS: (0.001, 0.003, 0.03),
}


def local_muon(budget: float, rate: Any, steps: int, mesh: Any) -> Any:
    """The study's row with another budget."""
    del steps
    return cd.local_muon(rate, budget=budget, **rows.matrices(mesh))


def run_of(budget: float, steps: int) -> Run:
    """A run by a name of its own, so that it goes on from no other's state."""
    rate = study.best_rate(study.read(), rows.LOCAL_MUON)
    if rate is None:
        raise ValueError("results/runs.jsonl has no learning rate: run study.py first.")
    name = f"`local_muon(budget={budget})`"
    rows.METHODS[name] = functools.partial(local_muon, budget)
    return Run(name, rate, SEED, steps)


def train() -> None:
    """Trains what is missing."""
    for steps, budgets in RUNS.items():
        for budget in budgets:
            run = run_of(budget, steps)
            if any(
                row["run"] == dataclasses.asdict(run) for row in study.rows_of(FILE)
            ):
                continue
            study.train_into(FILE, run, {"budget": budget})


def table() -> None:
    """Prints how far each budget ends above the best synchronous Muon.

    And how many steps it takes for each of Muon's to end as low: of the longer runs,
    interpolated between Muon's two lengths.
    """
    every = study.read()
    known = {
        (run.method, run.steps): row
        for run, row in every.items()
        if run.seed == SEED and run.rate == study.best_rate(every, run.method)
    }
    head = "steps", "budget", "syncs", "bytes", "loss", "above the best Muon"
    print("| " + " | ".join((*head, "steps for one of its")) + " |")
    print("|---" * 7 + "|")
    short, long = (known[rows.BEST_MUON, steps]["loss"] for steps in RUNS)
    for steps in RUNS:
        best = known[rows.BEST_MUON, steps]["loss"]
        found = [row for row in study.rows_of(FILE) if row["run"]["steps"] == steps]
        found.append({"budget": 0.01} | known[rows.LOCAL_MUON, steps])
        for row in sorted(found, key=lambda row: row["budget"]):
            cells = (
                f"{steps:,}",
                f"{row['budget']:.1%}",
                row["syncs"],
                f"{row['bytes'] / row['synchronous_bytes']:.2%}",
                f"{row['loss']:.4f}",
                f"{row['loss'] / best - 1:+.1%}",
                ""
                if steps == study.QUARTER
                else f"{1 / steps_to(row['loss'], short, long):.1f}",
            )
            print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    study.train_or_table(__doc__, train, table)
