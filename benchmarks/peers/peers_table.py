"""The tables of `README.md` from `results.jsonl`.

python benchmarks/peers/peers_table.py
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import measuring

RESULTS = Path(__file__).with_name("results.jsonl")
_OURS = "ours"
MOMENTS = (1, 5, 20, 50, 300)  # steps that the page shows; the rows have more


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Losses by seed, and how far each ends from ours, in percent of our loss.

    Examples:
        >>> row = {"peer": "them", "setting": "s", "seed": 0, "until": 9, "steps": 9}
        >>> row |= {"distance": {"b": {"9": 0}}}
        >>> text = table([row | {"loss": {"ours": 2.0, "b": 2.1}}])
        >>> text.splitlines()[-1]
        '| b | 0: 2.1000 | 5.00% | 0.0e+00 |'
    """
    runs: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['peer']}, {row['setting']}"
        if row["until"] < row["steps"]:
            name += f", stopped at step {row['until']}"
        for trainer in row["loss"]:
            runs.setdefault((name, trainer), {})[row["seed"]] = row
    lines = []
    for (name, trainer), by_seed in runs.items():
        losses = {seed: row["loss"][trainer] for seed, row in sorted(by_seed.items())}
        above = [
            100 * (row["loss"][trainer] / row["loss"][_OURS] - 1)
            for row in by_seed.values()
        ]
        apart = [distances(row, trainer)[-1] for row in by_seed.values()]
        cells = [
            name,
            trainer,
            ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items()),
            "" if trainer == _OURS else _spread(above),
            "" if trainer == _OURS else f"{statistics.mean(apart):.1e}",
        ]
        lines.append(cells)
    header = ("whose", "loss by seed", "above ours", "apart at the end")
    return "\n".join(measuring.markdown(header, measuring.grouped(lines)))


def distances(row: Mapping[str, Any], trainer: str) -> list[float]:
    """Relative distances of the parameters, in the order of the steps."""
    found = row["distance"].get(trainer, {"0": 0.0})
    return [found[step] for step in sorted(found, key=int)]


def steps(rows: Iterable[Mapping[str, Any]]) -> str:
    """How far the parameters are apart, by step, seed 0."""
    lines = []
    for row in rows:
        for trainer, found in row["distance"].items() if row["seed"] == 0 else ():
            cells = [f"{found[str(m)]:.0e}" if str(m) in found else "" for m in MOMENTS]
            lines.append(
                [f"{row['peer']}, from {next(iter(row['loss']))}", trainer, *cells]
            )
    header = ("whose", *map(str, MOMENTS))
    return "\n".join(measuring.markdown(header, measuring.grouped(lines)))


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}%"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}%"


if __name__ == "__main__":
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    print(table(found), steps(found), sep="\n\n")
