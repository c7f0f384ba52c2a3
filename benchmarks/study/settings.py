"""What other settings than the study's change, for Muon and `local_muon` alike.

    python benchmarks/study/settings.py      # 16 runs, an hour of a core; resumes
    python benchmarks/study/settings.py --table

Both train with settings of which one differs: the learning rate of the parameters that
AdamW trains, the weight decay of the matrices, or the momentum. They train for 260
steps on a seed that the study does not report. A line for each run goes to
`results/settings.jsonl`.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import optax
import rows
import study
from simulate import Run

import curvadion_jax as cd
from curvadion_jax import presets

FILE = study.RESULTS / "settings.jsonl"
# What is compared with, the study's settings but for the momentum, and what is changed,
# one at a time. The learning rate of the other parameters is a multiple of the
# matrices'.
BASE = {"others": 1.0, "weight_decay": 0.0, "momentum": "rising"}
OTHERS: tuple[dict[str, Any], ...] = (
    *({"others": multiple} for multiple in (0.25, 0.5, 2.0)),
    *({"weight_decay": decay} for decay in (0.02, 0.1)),
    *({"momentum": momentum} for momentum in (0.9, 0.95)),
)
METHODS = {rows.MUON: 0.08, rows.LOCAL_MUON: 0.04}  # and the study's learning rates


def optimizer(
    method: str, settings: dict[str, Any], rate: optax.Schedule, steps: int, mesh: Any
) -> optax.GradientTransformation:
    """A method of the study with these settings."""
    rising = settings["momentum"] == "rising"
    arguments: dict[str, Any] = {
        "momentum": rows.rising(steps) if rising else settings["momentum"],
        "adam_learning_rate": lambda count: settings["others"] * rate(count),
        "weight_decay": settings["weight_decay"],
        **rows.matrices(mesh),
    }
    if method == rows.MUON:
        return presets.synchronous_muon(rate, **arguments)
    return cd.local_muon(rate, budget=0.01, **arguments)


def train() -> None:
    """Trains what is missing."""
    tasks = [
        (method, BASE | settings) for settings in ({}, *OTHERS) for method in METHODS
    ]
    for method, settings in tasks:
        task = {"method": method, "settings": settings}
        if any(task.items() <= row.items() for row in study.rows_of(FILE)):
            continue
        rows.METHODS[method] = functools.partial(optimizer, method, settings)
        run = Run(method, METHODS[method], study.TUNING_SEED, study.QUARTER)
        study.train_into(FILE, run, task)


def table() -> None:
    """Prints the losses, and how far each is from that of the study's settings."""
    losses = {
        (row["method"], json.dumps(row["settings"])): row["loss"]
        for row in study.rows_of(FILE)
    }
    print("| changed | " + " | ".join(METHODS) + " |")
    print("|---" * (len(METHODS) + 1) + "|")
    for settings in ({}, *OTHERS):
        cells = []
        for method in METHODS:
            base = losses[method, json.dumps(BASE)]
            loss = losses.get((method, json.dumps(BASE | settings)))
            cells.append(f"{loss:.4f} ({loss / base - 1:+.1%})" if loss else "")
        name = ", ".join(f"{key} {value}" for key, value in settings.items())
        print(f"| {name or 'nothing'} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    study.train_or_table(__doc__, train, table)
