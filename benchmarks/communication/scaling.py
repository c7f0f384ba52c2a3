"""The table of the plan `scaling`, from its results.

    python benchmarks/communication/scaling.py

Writes `results/scaling.md` beside the results, and prints it.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import plans
import study
import tables
from runs import Run

Row = tables.Row
HEADER = [
    *("method", "momentum", "rate", "outer step", "trigger", "bytes", "syncs"),
    *("loss", "above Muon", "above even `local_muon`", "loss by seed"),
]


def document(results: plans.Results) -> str:
    """A table for every batch and length, each by loss."""
    rows = sorted(results.values(), key=_setting)
    parts = [
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
        f"    python benchmarks/communication/study.py scaling --size {size} "
        f"--steps {steps} --workers 1"
        for _, size, steps in settings
    ]
    head = [
        "# Longer runs and larger batches",
        "Losses in nats a byte, lower is better, of the mean of the replicas after the "
        "last step. The two columns 'above' compare equal seeds. ± is the standard "
        "deviation over seeds. 'budget 0.01 1 1' spends 1% of the bytes where the "
        "relative momentum change is large, at most 1 sync ahead of what is paid for "
        "and 1 behind.",
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, 2 CPU cores, with",
        "\n".join([*commands, "    python benchmarks/communication/scaling.py"]),
    ]
    return "\n\n".join([*head, *parts]) + "\n"


def _setting(row: Row) -> tuple[int, int, int]:
    return row["tokens"], row["run"]["replicas"], row["run"]["steps"]


def _table(rows: Sequence[Row]) -> str:
    key = lambda row: Run(**row["run"]).but(seed=0).key()  # noqa: E731
    twins = [
        sorted(of_run, key=lambda row: row["run"]["seed"])
        for _, of_run in itertools.groupby(sorted(rows, key=key), key)
    ]
    twins.sort(key=lambda of_run: statistics.fmean(row["loss"] for row in of_run))
    to_muon = _losses(rows, lambda run: run.inner == "muon")
    to_even = _losses(
        rows,
        lambda run: run.but(seed=0, steps=300).key() == plans.local_muon_evenly().key(),
    )
    cells = [_line(of_run, to_muon, to_even) for of_run in twins]
    return tables.markdown(HEADER, cells)


def _losses(rows: Sequence[Row], wanted: Callable[[Run], bool]) -> dict[int, float]:
    runs = [(Run(**row["run"]), row["loss"]) for row in rows]
    return {run.seed: loss for run, loss in runs if wanted(run)}


def _line(
    rows: Sequence[Row], to_muon: dict[int, float], to_even: dict[int, float]
) -> list[str]:
    run = Run(**rows[0]["run"])
    by_seed = {row["run"]["seed"]: row["loss"] for row in rows}
    losses = list(by_seed.values())
    mean = f"{statistics.fmean(losses):.4f}"
    if len(losses) > 1:
        mean += f" ± {statistics.stdev(losses):.4f}"
    return [
        rows[0]["method"],
        f"{run.momentum:g}",
        f"{run.learning_rate:g}",
        run.outer if run.sync == "reconcile" else "",
        run.trigger,
        f"{statistics.fmean(map(tables.share, rows)):.2f}%",
        f"{statistics.fmean(row['syncs'] for row in rows):.0f}",
        mean,
        *(_above(by_seed, reference) for reference in (to_muon, to_even)),
        ", ".join(f"{seed}: {loss:.4f}" for seed, loss in by_seed.items()),
    ]


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
    text = document(study.read(file))
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
