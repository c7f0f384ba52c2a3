"""The tables and the picture of the study, from its results.

    python benchmarks/communication/tables.py

Writes the tables as Markdown and draws the picture, beside the results.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import plans
import study
from matplotlib import pyplot
from runs import Run
from sizes import SIZES

Row = dict[str, Any]


def gap(row: Row, results: plans.Results, to: str = "dion") -> float | None:
    """Percent by which a loss lies above that of a tuned method with the same seed."""
    run = Run(**row["run"])
    reference = plans.tuned(to, results)
    if reference is None:
        return None
    twin = reference.but(seed=run.seed, steps=run.steps)
    if (base := results.get(twin.key())) is None:
        return None
    return 100 * (row["loss"] / base["loss"] - 1)


def share(row: Row) -> float:
    """Percent of the bytes of synchronous float32 training."""
    return 100 * row["bytes"] / row["synchronous_bytes"]


def seeds_of(run: Run, results: plans.Results) -> list[Row]:
    """The results of a run and of its twins with other seeds."""
    keys = {run.but(seed=seed).key() for seed in range(10)}
    return [row for key, row in results.items() if key in keys]


def gaps(run: Run, results: plans.Results, to: str = "dion") -> list[float]:
    """Those of all seeds that have a result, as has the other method."""
    found = [gap(row, results, to) for row in seeds_of(run, results)]
    return [value for value in found if value is not None]


def above(losses: Mapping[int, float], references: Mapping[int, float]) -> list[float]:
    """Percent above the reference with the same seed, of the seeds of both.

    Examples:
        >>> above({0: 3.0, 1: 2.0}, {0: 2.0, 2: 1.0})
        [50.0]
    """
    both = sorted(losses.keys() & references.keys())
    return [100 * (losses[seed] / references[seed] - 1) for seed in both]


def percent(numbers: Sequence[float]) -> str:
    """Mean and standard deviation with their unit; of none nothing."""
    return spread(numbers) + "%" if numbers else ""


def losses_by_seed(losses: Mapping[int, float]) -> str:
    """A cell of the losses of a run.

    Examples:
        >>> losses_by_seed({0: 1.5, 2: 1.25})
        '0: 1.5000, 2: 1.2500'
    """
    return ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items())


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """Mean, and the standard deviation where there are several.

    Examples:
        >>> spread([1.0]), spread([1.0, 2.0])
        ('1.00', '1.50 ± 0.71')
    """
    mean = f"{statistics.fmean(numbers):.{digits}f}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(numbers):.{digits}f}"


def line(label: str, run: Run, results: plans.Results) -> list[str]:
    """One method at one budget: label, bytes, syncs, loss, gaps, seeds, tuning."""
    rows = seeds_of(run, results)
    losses = [row["loss"] for row in rows]
    above = [gaps(run, results, to) for to in REFERENCES]
    return [
        label,
        f"{statistics.fmean(map(share, rows)):.2f}%",
        f"{statistics.fmean(row['syncs'] for row in rows):.0f}",
        f"{statistics.fmean(losses):.4f}",
        *(spread(values) + "%" if values else "" for values in above),
        str(len(rows)),
        *_tuned_values(run),
    ]


def _tuned_values(run: Run) -> list[str]:
    has_momentum = run.inner.split()[0] in ("dion", "muon", "curvadion")
    return [
        f"{run.learning_rate:g}",
        f"{run.momentum:g}" if has_momentum else "",
        run.outer if run.sync == "reconcile" else "",
    ]


TUNED = ["rate", "momentum", "outer step"]
# Synchronous training with the local optimizer of the published CurvaDion, and ours.
REFERENCES = {"dion": "above Dion", "muon": "above Muon"}
HEADER = ["method", "bytes", "syncs", "loss", *REFERENCES.values(), "seeds", *TUNED]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    Examples:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text)


def comparison(results: plans.Results) -> str:
    """All methods at all budgets, each with its tuned values, by loss."""
    rows = []
    for name, method in plans.METHODS.items():
        for run in plans.at_all_budgets(name, results):
            if run.key() in results:
                rows.append(line(method.label, run, results))
    return markdown(HEADER, sorted(rows, key=lambda row: float(row[3])))


def sweeps(results: plans.Results) -> str:
    """What was tried to tune each method, seed 0."""
    rows = []
    for name, method in plans.METHODS.items():
        chosen = plans.tuned(name, results)
        for run in plans.tuning_of(name, results):
            mark = " **chosen**" if run == chosen else ""
            row = results[run.key()]
            loss = f"{row['loss']:.4f}{mark}"
            rows.append([method.label, *_tuned_values(run), loss])
    return markdown(["method", *TUNED, "loss"], rows)


def by_replicas(results: plans.Results) -> str:
    """Loss above each reference with fewer replicas on the same batches."""
    rows = []
    for name in plans.AT_BUDGETS:
        if plans.tuned(name, results) is None:
            continue
        for to, against in REFERENCES.items():
            found = [
                gaps(run, results, to) for run in plans.with_replicas(name, results)
            ]
            cells = [f"{spread(each)}% ({len(each)})" if each else "" for each in found]
            rows.append([plans.METHODS[name].label, against, *cells])
    numbers = [f"{number} replicas (seeds)" for number in plans.REPLICAS]
    return markdown(["method", "", *numbers], rows)


def by_participation(results: plans.Results) -> str:
    """The winner's loss with participations in syncs left out at random."""
    if plans.tuned("local_muon", results) is None:
        return ""
    runs = plans.with_dropped(results)
    if not any(seeds_of(run, results) for run in runs[1:]):
        return ""
    rows = []
    for run in runs:
        found = {row["run"]["seed"]: row["loss"] for row in seeds_of(run, results)}
        base = {r["run"]["seed"]: r["loss"] for r in seeds_of(runs[0], results)}
        above = [100 * (found[seed] / base[seed] - 1) for seed in found if seed in base]
        if above:
            mean = f"{statistics.fmean(found.values()):.4f}"
            rows.append(
                [f"{run.dropped:.0%}", mean, spread(above) + "%", str(len(above))]
            )
    return markdown(["dropped", "loss", "above none dropped", "seeds"], rows)


def others(results: plans.Results) -> str:
    """Every other run: what was tried on the way, replicas, timing."""
    names = [name for name in plans.METHODS if plans.tuned(name, results)]
    tables = [plans.tuning_of, plans.at_all_budgets, plans.with_replicas]
    shown = {
        run.but(seed=seed).key()
        for name in names
        for table in tables
        for run in table(name, results)
        for seed in range(10)
    }
    if "local_muon" in names:
        dropped = plans.with_dropped(results)
        shown |= {run.but(seed=seed).key() for run in dropped for seed in range(10)}
    standard = Run("dion 1.0", 0.04)
    rows, done = [], set()
    for key, row in results.items():
        run = Run(**row["run"])
        if key in shown or run.but(seed=0).key() in done:
            continue
        done.add(run.but(seed=0).key())
        text = ", ".join(
            f"{field} {value}"
            for field, value in row["run"].items()
            if field not in ("seed",) and value != getattr(standard, field)
        )
        cells = line(text, run, results)
        rows.append(cells[:7])
    rows.sort(key=lambda row: float(row[3]))
    return markdown(["run", *HEADER[1:7]], rows)


def draw(results: plans.Results, file: Path) -> None:
    """Gap against bytes, a line a method."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, method in plans.METHODS.items():
        points = []
        for run in plans.at_all_budgets(name, results):
            if above := gaps(run, results):
                error = statistics.stdev(above) if len(above) > 1 else 0.0
                rows = seeds_of(run, results)
                points.append((share(rows[0]), statistics.fmean(above), error))
        if points:
            x, y, error = zip(*sorted(points), strict=True)
            axes.errorbar(
                x, y, error, marker="o", capsize=3, label=method.label.replace("`", "")
            )
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("bytes, percent of synchronous float32 gradients")
    axes.set_ylabel("loss above tuned synchronous Dion, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def document(results: plans.Results) -> str:
    """All tables that have rows, each under its heading."""
    if any("tokens" in row for row in results.values()):  # of several sizes
        import scaling

        return scaling.document(results)
    parts = {
        "Methods": comparison(results),
        "Replicas": by_replicas(results),
        "Participation": by_participation(results),
        "Tuning, on seed 0": sweeps(results),
        "All other runs": others(results),
    }
    heading = 2  # lines
    text = "\n\n".join(
        f"## {title}\n\n{table}"
        for title, table in parts.items()
        if len(table.splitlines()) > heading
    )
    return f"# Results\n\n{text}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--results", type=Path, default=study.RESULTS, help="directory")
    options = parser.parse_args(arguments)
    file = options.results / f"{options.size}.jsonl"
    results = study.read(file)
    file.with_suffix(".md").write_text(document(results))
    draw(results, file.with_suffix(".png"))
    print(comparison(results))


if __name__ == "__main__":
    main()
