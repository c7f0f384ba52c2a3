"""The map of batch and length: its table, its picture and its sentence.

    python benchmarks/gpu/map_table.py
    python benchmarks/gpu/map_table.py --rows benchmarks/study/map/rows.jsonl --study

From `map/rows.jsonl`, which `queue_jobs.py` writes, to `map/map.md` and `map/map.png`.
With `--study` the study's own runs on seed 0 belong to it.
Each cell is the gap of a method to the best synchronous Muon at the same batch, number
of tokens and replicas; of two learning rates the better one counts on both sides.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in (".", "examples/char_lm", "benchmarks", "benchmarks/study")
]

import measuring  # noqa: E402
import study  # noqa: E402
from rows import BEST_MUON, LOCAL_MUON  # noqa: E402
from simulate import Size  # noqa: E402

ROWS = Path(__file__).with_name("map") / "rows.jsonl"
# Tokens per replica and step, and percent above data parallel, of larger models:
# MuLoCo with 16 workers, 150M to 15B (arXiv 2505.23725v2).
PUBLISHED = {262_144: (1.7, 3.1)}


class Place(NamedTuple):
    """A point: model width, replicas, tokens per replica and step, tokens in all."""

    width: int
    replicas: int
    batch: int
    tokens: int


def place_of(row: Mapping[str, Any]) -> Place:
    """Where a row stands; tokens are rounded to two digits."""
    size, batch = row["size"], row["size"]["sequences"] * row["size"]["length"]
    tokens = row["run"]["steps"] * size["replicas"] * batch
    rounded = int(float(f"{tokens:.1e}"))
    return Place(size["width"], size["replicas"], batch, rounded)


def best(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Place, str], Mapping]:
    """The row with the lowest loss of every place and method."""
    found: dict[tuple[Place, str], Mapping] = {}
    for row in rows:
        if "loss" not in row or row["group"] == "throughput":
            continue
        key = place_of(row), row["run"]["method"]
        if key not in found or row["loss"] < found[key]["loss"]:
            found[key] = row
    return found


def gaps(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Place, str], float]:
    """Percent above the best synchronous Muon at the same place."""
    found = best(rows)
    return {
        (place, method): 100 * (row["loss"] / found[place, BEST_MUON]["loss"] - 1)
        for (place, method), row in found.items()
        if method != BEST_MUON and (place, BEST_MUON) in found
    }


def table(rows: list[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    found, above = best(rows), gaps(rows)
    header = ["method", "learning rate", "loss", "above the best Muon", "bytes"]

    def lines():
        for (place, method), row in sorted(found.items()):
            gap = above.get((place, method))
            share = row["bytes"] / row["synchronous_bytes"]
            width, replicas, batch, tokens = (f"{x:,}" for x in place)
            yield [
                f"width {width}, {replicas} replicas, {batch} tokens, {tokens} in all",
                method,
                f"{row['run']['rate']:g}",
                f"{row['loss']:.4f}",
                "" if gap is None else f"{gap:.1f}%",
                f"{100 * share:.2f}%",
            ]

    return [*measuring.markdown(header, measuring.grouped(lines()))]


def of_study() -> list[dict[str, Any]]:
    """The study's rows of both methods on seed 0, which have one size."""
    size = dataclasses.asdict(Size())
    return [
        {"group": "study", "size": size, **row}
        for run, row in study.read().items()
        if run.seed == 0 and run.method in (BEST_MUON, LOCAL_MUON)
    ]


def throughput(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of the table of the variants."""
    names = ("at_once", "half", "attention")
    header = ["at once", "bfloat16", "attention"]

    def lines():
        for row in rows:
            if row["group"] == "throughput":
                ended = row.get("error") or f"{row['loss']:.4f}"
                speed = f"{row.get('tokens_a_second', 0):,}"
                yield [*(str(row["size"][x]) for x in names), ended, speed]

    return [*measuring.markdown([*header, "loss", "tokens a second"], lines())]


def draw(rows: Iterable[Mapping[str, Any]], file: Path) -> None:
    """The gap over tokens per replica and step, and over the length of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), sharey=True, layout="constrained"
    )
    points = [(x, y) for (x, method), y in gaps(rows).items() if method == LOCAL_MUON]
    for axes, name, same in ((left, "batch", "tokens"), (right, "tokens", "batch")):
        lines: dict[tuple, list] = {}
        for place, gap in points:
            key = place.width, place.replicas, getattr(place, same)
            lines.setdefault(key, []).append((getattr(place, name), gap))
        for (width, replicas, other), line in sorted(lines.items()):
            label = f"width {width}, {replicas} replicas, {same} {other:,}"
            axes.plot(*zip(*sorted(line), strict=True), marker="o", label=label)
        axes.set(xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for batch, (low, high) in PUBLISHED.items():
        left.plot([batch, batch], [low, high], color="gray", linewidth=4)
        left.annotate("MuLoCo, 16 workers", (batch, high), fontsize=7, ha="right")
    left.set(xlabel="tokens per replica and step", ylabel="% above the best Muon")
    right.set(xlabel="tokens of the run")
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--study", action="store_true", help="with the study's runs")
    options = parser.parse_args()
    rows = study.rows_of(options.rows)
    rows = [row for row in rows if "run" in row]
    if options.study:
        rows += of_study()
    text = "\n\n".join("\n".join(part) for part in (table(rows), throughput(rows)))
    options.rows.with_name("map.md").write_text(text + "\n")
    draw(rows, options.rows.with_name("map.png"))
    print(text)


if __name__ == "__main__":
    main()
