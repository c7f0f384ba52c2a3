"""The tables and the picture of the study, from its results.

    python benchmarks/communication/tables.py [--results DIR]

Writes `tables.md` and `picture.png` beside the results, and prints the tables. Losses
are those on held-out source code where the results have them.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import study
from matplotlib import pyplot
from plans import LOCAL_MUON, MUON, NAMES
from runs import Run
from sizes import SIZES

Results = Mapping[str, dict[str, Any]]
TEXTS = {"source": "source code", "all": "all that is held out", "training": "training"}


def loss(row: Mapping[str, Any], text: str) -> float | None:
    """The loss of a result on a text, None where it has none."""
    return row["loss"] if text == "all" else row["losses"].get(text)


def by_seed(
    results: Results, size: str, run: Run, text: str = "source"
) -> dict[int, float]:
    """Losses of a run and of its twins with other seeds."""
    found = {}
    for seed in range(10):
        row = results.get(study.key(size, run.but(seed=seed)))
        if row is not None and (value := loss(row, text)) is not None:
            found[seed] = value
    return found


def above(losses: Mapping[int, float], references: Mapping[int, float]) -> list[float]:
    """Percent above the reference with the same seed, of the seeds of both.

    Examples:
        >>> above({0: 3.0, 1: 2.0}, {0: 2.0, 2: 1.0})
        [50.0]
    """
    both = sorted(losses.keys() & references.keys())
    return [100 * (losses[seed] / references[seed] - 1) for seed in both]


def spread(numbers: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Mean, and the standard deviation where there are several; of none nothing.

    Examples:
        >>> spread([1.0]), spread([1.0, 2.0], 1, "%"), spread([])
        ('1.00', '1.5 ± 0.7%', '')
    """
    if not numbers:
        return ""
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    if len(numbers) > 1:
        mean += f" ± {statistics.stdev(numbers):.{digits}f}"
    return mean + unit


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    Examples:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [header, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def setting(results: Results, size: str, steps: int) -> str:
    """All runs of a size and length, by loss: what of them differs, and how far."""
    runs = dict.fromkeys(
        Run(**row["run"]).but(seed=0)
        for row in results.values()
        if row["size"] == size and row["run"]["steps"] == steps
    )
    rows = []
    for run in runs:
        losses = {text: by_seed(results, size, run, text) for text in TEXTS}
        muon = MUON.but(steps=steps)
        gaps = [
            spread(above(losses[text], by_seed(results, size, muon, text)), unit="%")
            for text in TEXTS
        ]
        row = next(
            results[study.key(size, run.but(seed=seed))] for seed in losses["all"]
        )
        share = f"{100 * row['bytes'] / row['synchronous_bytes']:.2f}%"
        seeds = ", ".join(map(str, losses["all"]))
        mean = spread([*losses["source"].values()], 4)
        rows.append([*_words(run), share, str(row["syncs"]), mean, *gaps, seeds])
    rows.sort(key=lambda cells: cells[9])
    tokens = SIZES[size].tokens
    header = ["method", "replicas", "rate", "momentum", "syncs by", "form"]
    header += ["outer step", "bytes", "syncs", "loss"]
    header += [*(f"above Muon, {text}" for text in TEXTS.values()), "seeds"]
    title = f"## {tokens:,} tokens a step of all replicas, {steps:,} steps (`{size}`)"
    return f"{title}\n\n{markdown(header, rows)}"


def _words(run: Run) -> list[str]:
    last = "" if run.last_momentum is None else f" to {run.last_momentum:g}"
    local = run.sync == "reconcile"
    momentum = "" if run.inner == "adamw" else f"{run.momentum:g}{last}"
    return [
        NAMES.get(run.inner, run.inner),
        str(run.replicas),
        f"{run.learning_rate:g}" + (f" to x{run.final:g}" if run.final != 0.05 else ""),
        momentum + (f" {run.state}" if run.state != "float32" else ""),
        run.trigger,
        run.compressor,
        run.outer if local else "",
    ]


def steps_to(wanted: float, ends: Mapping[int, float]) -> float | None:
    """Steps of a run that ends at a loss, from the losses at which others end.

    Between two lengths the loss is taken for a power of the steps; None outside.

    Examples:
        >>> steps_to(2.0, {100: 4.0, 400: 1.0}), steps_to(5.0, {100: 4.0, 400: 1.0})
        (200.0, None)
    """
    for short, long in itertools.pairwise(sorted(ends)):
        if ends[long] <= wanted < ends[short]:
            share = math.log(ends[short] / wanted) / math.log(ends[short] / ends[long])
            return short * (long / short) ** share
    return None


def in_steps(results: Results) -> str:
    """How many steps synchronous Muon needs to end where `local_muon` ends."""
    lengths = sorted({row["run"]["steps"] for row in results.values()})
    rows = []
    for size, steps in itertools.product(SIZES, lengths):
        muon = {n: by_seed(results, size, MUON.but(steps=n)) for n in lengths}
        found = {}
        for seed, wanted in by_seed(results, size, LOCAL_MUON.but(steps=steps)).items():
            ends = {n: of_seed[seed] for n, of_seed in muon.items() if seed in of_seed}
            if (there := steps_to(wanted, ends)) is not None:
                found[seed] = there
        if found:
            of_muon = ", ".join(f"{seed}: {x:,.0f}" for seed, x in found.items())
            ratio = spread([steps / x for x in found.values()])
            rows.append([size, f"{steps:,}", of_muon, ratio])
    header = ["size", "steps of `local_muon`", "steps of Muon by seed", "ratio"]
    return f"## The gap in steps\n\n{markdown(header, rows)}"


def document(results: Results) -> str:
    """All tables."""
    dates = sorted({row["date"] for row in results.values()})
    settings = {(row["size"], row["run"]["steps"]): 0 for row in results.values()}
    for row in results.values():
        settings[row["size"], row["run"]["steps"]] += row["run"]["inner"] != "muon"
    order = list(SIZES)
    shown = [at for at, others in settings.items() if others]
    shown.sort(key=lambda at: (order.index(at[0]), at[1]))
    head = (
        "# Results of the study\n\nWritten by `tables.py`. Losses in nats a token on "
        "held-out source code, of the mean of the replicas after the last step. "
        "'Above Muon' compares equal seeds with synchronous Muon at a rate of 0.08 and "
        "a momentum from 0.8 to 0.95, on three texts; ± is the standard deviation "
        "over seeds. 2 CPU cores, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )
    tables = (setting(results, size, steps) for size, steps in shown)
    return "\n\n".join([head, in_steps(results), *tables]) + "\n"


def draw(results: Results, file: Path) -> None:
    """The gap of `local_muon` by steps and batch, and by batch and replicas."""
    figure, panels = pyplot.subplots(
        1, 2, figsize=(9, 4), layout="constrained", sharey=True
    )
    lengths = sorted({row["run"]["steps"] for row in results.values()})
    for size in SIZES:
        gaps = {n: _gap(results, size, LOCAL_MUON.but(steps=n)) for n in lengths}
        _curve(panels[0], gaps, f"{SIZES[size].tokens // 8:,} tokens")
    for number in (2, 4, 8, 16):
        run = LOCAL_MUON.but(replicas=number)
        gaps = {
            x.tokens // number: gap
            for size, x in SIZES.items()
            if (gap := _gap(results, size, run))
        }
        _curve(panels[1], gaps, f"{number} replicas")
    panels[0].set_xticks(lengths)
    panels[0].set_ylabel("loss above synchronous Muon, percent")
    panels[0].set_xlabel("steps, 8 replicas")
    panels[1].set_xlabel("tokens per replica and step, 300 steps")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("local_muon at 1% of the bytes, held-out source code")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _gap(results: Results, size: str, run: Run) -> list[float]:
    muon = by_seed(results, size, MUON.but(steps=run.steps))
    return above(by_seed(results, size, run), muon)


def _curve(axes: Any, gaps: Mapping[int, Sequence[float]], label: str) -> None:
    found = {x: gap for x, gap in gaps.items() if gap}
    if found:
        means = [statistics.fmean(gap) for gap in found.values()]
        error = [
            statistics.stdev(x) if len(x) > 1 else math.nan for x in found.values()
        ]
        axes.errorbar([*found], means, error, marker="o", capsize=3, label=label)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=study.RESULTS, help="directory")
    options = parser.parse_args(arguments)
    results = study.read(options.results / study.FILE)
    text = document(results)
    (options.results / "tables.md").write_text(text)
    draw(results, options.results / "picture.png")
    print(text)


if __name__ == "__main__":
    main()
