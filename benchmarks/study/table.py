"""The tables of the study, from its results.

    python benchmarks/study/table.py

Writes `table.md` beside the results; `docs/pictures/make.py` draws them.
"""

import collections
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import measuring
import study
from rows import (
    ADAMW,
    BEST_MUON,
    COMPARED_WITH,
    CURVADION,
    DILOCO,
    LARGE_BATCH,
    LOCAL_MUON,
    METHODS,
    MULOCO,
    MUON,
)
from simulate import Run


def by_seed(results: study.Results, method: str, steps: int) -> dict[int, dict]:
    """The results of a method at its best learning rate, by seed."""
    rate = study.best_rate(results, method, steps)
    runs = {seed: Run(method, rate or 0.0, seed, steps) for seed in study.SEEDS}
    return {seed: results[run] for seed, run in runs.items() if run in results}


def above(rows: Mapping[int, Any], references: Mapping[int, Any]) -> list[float]:
    """Percent above the reference with the same seed, of the seeds of both.

    Examples:
        >>> above({0: {"loss": 3.0}, 1: {"loss": 2.0}}, {0: {"loss": 2.0}})
        [50.0]
    """
    both = sorted(rows.keys() & references.keys())
    return [100 * (rows[seed]["loss"] / references[seed]["loss"] - 1) for seed in both]


def spread(numbers: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Mean, and the standard deviation where there are several; of none nothing.

    Examples:
        >>> spread([1.0]), spread([1.0, 2.0], 1, "%"), spread([])
        ('1.00', '1.5 ± 0.7%', '')
    """
    if not numbers:
        return ""
    mean = f"{statistics.fmean(numbers):z.{digits}f}"
    if len(numbers) > 1:
        mean += f" ± {statistics.stdev(numbers):.{digits}f}"
    return mean + unit


def share_of_bytes(row: Mapping[str, Any], steps: int) -> float:
    """Bytes over those of synchronous training, with the mean that ends local steps."""
    last = 1 / steps if row["divergence"] > 1e-6 else 0
    return row["bytes"] / row["synchronous_bytes"] + last


def steps_to(wanted: float, short: float, long: float) -> float:
    """Share of the steps at which Muon would end at a loss.

    Muon's loss after a quarter of the steps and after all is taken for a power of them.

    Examples:
        >>> steps_to(2.0, short=4.0, long=2.0), steps_to(4.0, short=4.0, long=2.0)
        (1.0, 0.25)
    """
    slope = math.log(short / long) / math.log(study.QUARTER / study.STEPS)
    return (wanted / long) ** (1 / slope)


def share_of_steps(
    results: study.Results, method: str, against: str, steps: int
) -> list[float]:
    """Percent of the steps at which another method would end at this one's loss.

    Of every seed; nothing where that is below a quarter of the steps, at which the
    other method was not trained.
    """
    rows = by_seed(results, method, steps)
    short, long = (by_seed(results, against, n) for n in (study.QUARTER, study.STEPS))
    needed = [
        steps_to(rows[seed]["loss"], short[seed]["loss"], long[seed]["loss"])
        for seed in sorted(rows.keys() & short.keys() & long.keys())
    ]
    if needed and min(needed) < 0.99 * study.QUARTER / study.STEPS:
        return []
    return [100 * study.STEPS / steps * share for share in needed]


LOSSES = ("method", "bytes", "syncs", "loss", "above the best Muon")
COMPARED = ("method, learning rate", "above Muon", "below AdamW")
STEPS = ("steps of Muon", "of the best Muon")


def table(results: study.Results, steps: int) -> str:
    """All methods after so many steps, in Markdown; losses in nats per byte.

    Two tables, so that each fits a phone.
    """
    muon, best, adamw = (
        by_seed(results, name, steps) for name in (MUON, BEST_MUON, ADAMW)
    )
    losses, compared = [], []
    for method in METHODS:
        rows = by_seed(results, method, steps)
        if not rows:
            continue
        share = [100 * share_of_bytes(x, steps) for x in rows.values()]
        name = method if len(rows) == len(study.SEEDS) else f"{method} ({len(rows)})"
        cells = [
            name,
            f"{statistics.fmean(share):.2f}%",
            f"{statistics.fmean(x['syncs'] for x in rows.values()):.0f}",
            spread([x["loss"] for x in rows.values()], 4),
            spread(above(rows, best), unit="%"),
        ]
        losses.append(cells)
        cells = [
            f"{name}, {study.best_rate(results, method, steps):g}",
            spread(above(rows, muon), unit="%"),
            spread([-x for x in above(rows, adamw)], 1, "%"),
        ]
        if steps == study.STEPS:  # a quarter of them has hardly any to show
            against = (MUON, BEST_MUON)
            needed = (share_of_steps(results, method, x, steps) for x in against)
            cells += [spread(each, 0, "%") for each in needed]
        compared.append(cells)
    header = COMPARED + STEPS * (steps == study.STEPS)
    first, second = (LOSSES, losses), (header, compared)
    return "\n\n".join("\n".join(measuring.markdown(*x)) for x in (first, second))


def headline(results: study.Results) -> str:
    """The sentences of the README and the documentation, from the same rows."""
    lines = []
    for method in (LOCAL_MUON, CURVADION, LARGE_BATCH, MULOCO, DILOCO):
        rows = by_seed(results, method, study.STEPS)
        if not rows:
            continue
        share = 100 * statistics.fmean(
            share_of_bytes(x, study.STEPS) for x in rows.values()
        )
        against = {"Muon": MUON, "the best Muon": BEST_MUON, "AdamW": ADAMW}
        parts = []
        for words, name in against.items():
            found = above(rows, by_seed(results, name, study.STEPS))
            if found:
                is_above = statistics.fmean(found) >= 0
                sign, side = (1, "above") if is_above else (-1, "below")
                distance = spread([sign * x for x in found], 1, "%")
                parts.append(f"{distance} {side} {words}")
        for name, words in ((MUON, "Muon"), (BEST_MUON, "the best Muon")):
            if needed := share_of_steps(results, method, name, study.STEPS):
                text = spread(needed, 0, "%")
                parts.append(f"a loss that {words} has after {text} of the steps")
        seeds = f"{len(rows)} seed{'s' * (len(rows) > 1)}"
        lines.append(
            f"* {method}, {share:.1f}% of the bytes, {seeds}: {'; '.join(parts)}."
        )
    return "\n".join(lines)


def rates(results: study.Results) -> str:
    """Loss by learning rate, from which each method took its own."""
    lines = []
    for method in study.RATES:
        losses = sorted(study.losses_by_rate(results, method).items())
        if not losses:
            continue
        cells = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses)
        lines.append([method, cells])
    return "\n".join(measuring.markdown(["method", "loss by learning rate"], lines))


def second_rates(results: study.Results) -> str:
    """All steps at both rates of the methods that others are compared with."""
    lines = []
    for method in COMPARED_WITH:
        for rate in sorted(study.best_rates(results, method)[:2]):
            runs = [Run(method, rate, seed, study.STEPS) for seed in study.SEEDS]
            losses = [results[run]["loss"] for run in runs if run in results]
            if losses:
                each = ", ".join(f"{loss:.4f}" for loss in losses)
                lines.append([method, f"{rate:g}", each, spread(losses, 4)])
    header = ["method", "learning rate", "loss by seed", "mean"]
    return "\n".join(measuring.markdown(header, lines))


def document(results: study.Results) -> str:
    """All tables."""
    dates = sorted({row["date"] for row in results.values()})
    if len(texts := {row["text"] for row in results.values()}) > 1:
        raise SystemExit(f"The results are of several texts: {texts}.")
    machines = collections.Counter(
        f"{row['device']} with JAX {row['jax']}" for row in results.values()
    )
    where = ", ".join(f"{runs} runs on {name}" for name, runs in machines.items())
    parts = [
        f"# Results of the study\n\nWritten by `table.py`. {where}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. ± is "
        f"the standard deviation over {len(study.SEEDS)} seeds (of fewer, their number "
        "is in brackets after the method); methods are compared on equal seeds. The "
        f"best Muon is {BEST_MUON!r}. *Steps of Muon* and *of the best Muon* are the "
        "share of the steps after which they have this loss.",
        f"## In words\n\n{study.STEPS:,} steps.\n\n{headline(results)}",
    ]
    for steps in (study.STEPS, study.QUARTER):
        if by_seed(results, MUON, steps):
            parts.append(f"## {steps:,} steps\n\n{table(results, steps)}")
    text = (
        f"## Learning rates\n\nOne seed, {study.QUARTER} steps.\n\n{rates(results)}"
        f"\n\nThe methods that others are compared with, {study.STEPS:,} steps at two "
        f"rates; the lower mean is the zero.\n\n{second_rates(results)}"
    )
    return "\n\n".join([*parts, text]) + "\n"


def main() -> None:
    """Run the program."""
    results = study.read()
    text = document(results)
    (study.RESULTS / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
