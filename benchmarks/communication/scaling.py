"""The tables, the picture and the law of the plans of `gap.py`, from their results.

    python benchmarks/communication/scaling.py

Writes `results/scaling.md` and `scaling.png` beside the results, and prints the text.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import gap
import numpy as np
import plans
import study
import tables
from matplotlib import pyplot
from runs import Run

Row = tables.Row
Gaps = dict[tuple[int, int], list[float]]
HEADER = [
    *("method", "momentum", "rate", "outer step", "trigger", "form", "else"),
    *("bytes", "syncs", "loss", "above Muon", "above Dion", "above even `local_muon`"),
    "loss by seed",
]
# What the law is fitted to, at any seed, batch and length.
LINES = {"`local_muon`": gap.local_muon_evenly(), "rising momentum": gap.rising()}
TARGET = (131_072, 100_000)  # 160 million parameters, 2^20 tokens a step


def document(results: plans.Results) -> str:
    """The law, and a table for every batch and length, each by loss."""
    rows = sorted(results.values(), key=_setting)
    tables_ = [
        f"## {tokens:,} tokens a replica and step, {replicas} replicas, {steps:,} steps"
        f"\n\n{_table(list(of_setting))}"
        for (tokens, replicas, steps), of_setting in itertools.groupby(rows, _setting)
    ]
    dates = sorted({row["date"] for row in rows})
    settings = sorted(
        {(row["tokens"], row["size"], row["run"]["steps"]) for row in rows},
        key=lambda setting: (setting[0], setting[2]),
    )
    commands = [
        f"    python benchmarks/communication/study.py {plan} --size {size} "
        f"--steps {steps} --workers 1"
        for _, size, steps in settings
        for plan in gap.PLANS
        if (plan, size, steps) != ("scaling", "cpu-32k", 300)
    ]
    head = [
        "# Longer runs and larger batches",
        "Losses in nats a byte, lower is better, of the mean of the replicas after the "
        "last step. The columns 'above' compare equal seeds. ± is the standard "
        "deviation over seeds. 'budget 0.01 1 1' spends 1% of the bytes where the "
        "relative momentum change is large, at most 1 sync ahead of what is paid for "
        "and 1 behind; other words as `runs.py` explains them. What is not said under "
        "'else' is as in even `local_muon`.",
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, 2 CPU cores, with",
        "\n".join([*commands, "    python benchmarks/communication/scaling.py"]),
    ]
    return "\n\n".join([*head, law(results), *tables_]) + "\n"


def points(line: Run, results: plans.Results) -> Gaps:
    """Percent above synchronous Muon by tokens a replica and step, and steps."""
    found: Gaps = {}
    rows = sorted(results.values(), key=_setting)
    for (tokens, _, steps), of_setting in itertools.groupby(rows, _setting):
        of_setting = list(of_setting)
        muon = _losses(of_setting, gap.muon())
        losses = _losses(of_setting, line)
        if above := [
            100 * (losses[seed] / muon[seed] - 1) for seed in losses if seed in muon
        ]:
            found[tokens, steps] = above
    return found


@dataclasses.dataclass(frozen=True)
class Law:
    """Gap = scale of the method (tokens / 1024)^-a (steps / 300)^-b, in percent."""

    scales: dict[str, float]
    a: float
    b: float

    def at(self, label: str, tokens: int, steps: int) -> float:
        """The gap at a setting."""
        decay = (tokens / 1024) ** -self.a * (steps / 300) ** -self.b
        return self.scales[label] * decay


def fit(gaps: dict[str, Gaps]) -> Law:
    """Least squares in the logarithm of the gaps; the powers are of all methods."""
    labels = list(gaps)
    features, wanted = [], []
    for label, found in gaps.items():
        for (tokens, steps), above in found.items():
            logs = -math.log(tokens / 1024), -math.log(steps / 300)
            features.append([*(float(each == label) for each in labels), *logs])
            wanted.append(math.log(statistics.fmean(above)))
    *scales, a, b = np.linalg.lstsq(np.array(features), np.array(wanted))[0]
    return Law(dict(zip(labels, map(math.exp, scales), strict=True)), a, b)


def law(results: plans.Results) -> str:
    """The gap to synchronous Muon at all settings, and the power law through it."""
    gaps = {label: points(line, results) for label, line in LINES.items()}
    gaps = {label: found for label, found in gaps.items() if found}
    means = [statistics.fmean(x) for found in gaps.values() for x in found.values()]
    enough = len(means) > len(gaps) + 2 and min(means) > 0
    fitted = fit(gaps) if enough else None
    header = ["method", "tokens", "steps", "above Muon", "seeds", "by the law"]
    cells = [
        [
            *(label, f"{tokens:,}", f"{steps:,}", tables.spread(above) + "%"),
            *(str(len(above)), f"{fitted.at(label, *at):.2f}%" if fitted else ""),
        ]
        for label, found in gaps.items()
        for at, above in found.items()
        for tokens, steps in [at]
    ]
    text = f"## Above synchronous Muon\n\n{tables.markdown(header, cells)}"
    if fitted is None:
        return text
    scales = " or ".join(f"{fitted.scales[label]:.2f}% ({label})" for label in gaps)
    far = " and ".join(f"{fitted.at(label, *TARGET):.3f}%" for label in gaps)
    return (
        f"{text}\n\nThe law: {scales} times (tokens / 1,024)^-{fitted.a:.2f} "
        f"(steps / 300)^-{fitted.b:.2f}, {len(gaps) + 2} numbers from {len(means)} "
        f"points. At {TARGET[0]:,} tokens and {TARGET[1]:,} steps it says {far}; that "
        "is some 30 and 80 times beyond what was run, and is not to be relied on."
    )


def draw(results: plans.Results, file: Path) -> None:
    """Gap against steps, a line a method and batch."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, line in LINES.items():
        found = points(line, results)
        for tokens in sorted({tokens for tokens, _ in found}):
            at = [(steps, found[t, steps]) for t, steps in found if t == tokens]
            error = [
                statistics.stdev(above) if len(above) > 1 else 0.0 for _, above in at
            ]
            axes.errorbar(
                [steps for steps, _ in at],
                [statistics.fmean(above) for _, above in at],
                error,
                marker="o",
                capsize=3,
                label=f"{label.replace('`', '')}, {tokens:,} tokens a replica",
            )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    lengths = sorted({row["run"]["steps"] for row in results.values()})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("steps")
    axes.set_ylabel("loss above synchronous Muon, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _setting(row: Row) -> tuple[int, int, int]:
    return row["tokens"], row["run"]["replicas"], row["run"]["steps"]


def _table(rows: Sequence[Row]) -> str:
    key = lambda row: Run(**row["run"]).but(seed=0).key()  # noqa: E731
    twins = [
        sorted(of_run, key=lambda row: row["run"]["seed"])
        for _, of_run in itertools.groupby(sorted(rows, key=key), key)
    ]
    twins.sort(key=lambda of_run: statistics.fmean(row["loss"] for row in of_run))
    dion = {
        row["run"]["seed"]: row["loss"]
        for row in rows
        if row["run"]["inner"] == "dion 1.0"
    }
    references = [
        _losses(rows, gap.muon()),
        dion,
        _losses(rows, gap.local_muon_evenly()),
    ]
    return tables.markdown(HEADER, [_line(of_run, references) for of_run in twins])


def _losses(rows: Sequence[Row], wanted: Run) -> dict[int, float]:
    """Loss by seed of those of the rows that are such a run, of any length."""
    runs = [(Run(**row["run"]), row["loss"]) for row in rows]
    return {
        run.seed: loss
        for run, loss in runs
        if run.but(seed=wanted.seed, steps=wanted.steps) == wanted
    }


def _line(rows: Sequence[Row], references: Sequence[dict[int, float]]) -> list[str]:
    run = Run(**rows[0]["run"])
    by_seed = {row["run"]["seed"]: row["loss"] for row in rows}
    losses = list(by_seed.values())
    mean = f"{statistics.fmean(losses):.4f}"
    if len(losses) > 1:
        mean += f" ± {statistics.stdev(losses):.4f}"
    last = "" if run.last_momentum is None else f" to {run.last_momentum:g}"
    return [
        rows[0]["method"],
        f"{run.momentum:g}{last}",
        f"{run.learning_rate:g}",
        run.outer if run.sync == "reconcile" else "",
        run.trigger,
        run.compressor,
        _else(run),
        f"{statistics.fmean(map(tables.share, rows)):.2f}%",
        f"{statistics.fmean(row['syncs'] for row in rows):.0f}",
        mean,
        *(_above(by_seed, reference) for reference in references),
        ", ".join(f"{seed}: {loss:.4f}" for seed, loss in by_seed.items()),
    ]


def _else(run: Run) -> str:
    base = gap.local_muon_evenly()
    names = ("final", "other_rate", "sent_momentum")
    return ", ".join(
        f"{name.replace('_', ' ')} {getattr(run, name)}"
        for name in names
        if getattr(run, name) != getattr(base, name)
    )


def _above(losses: dict[int, float], reference: dict[int, float]) -> str:
    found = [
        100 * (loss / reference[seed] - 1)
        for seed, loss in losses.items()
        if seed in reference
    ]
    return tables.spread(found) + "%" if found else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=study.RESULTS, help="directory")
    options = parser.parse_args(arguments)
    file = options.results / "scaling.jsonl"
    results = study.read(file)
    text = document(results)
    draw(results, file.with_suffix(".png"))
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
