"""The tables, the picture and the law of the plans of `gap.py`, from their results.

    python benchmarks/communication/scaling.py
    python benchmarks/communication/scaling.py --results DIR

Writes `scaling.md` and `scaling.png` beside the results, and prints the text. Where all
rows have a loss on source code, as in `results/by_text`, all tables are of that one.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import alternatives
import bases
import comparisons
import gap
import law
import lengths
import plans
import study
import tables
from matplotlib import pyplot
from runs import Run

Row = tables.Row
REPLICAS = 8
TEXTS = {
    "all": "on all that is held out",
    "source": "on source code that is held out",
}
# Of a setting that the law is fitted to: on all text one seed is off by more than it.
SEEDS = {"all": 3, "source": 1}
HEADER = [
    *("method", "momentum", "rate", "outer step", "trigger", "form", "else"),
    *("bytes", "syncs", "loss", "above Muon", "above Muon, rising", "above Dion"),
    *("above even `local_muon`", "above it, rising", "loss by seed"),
]


def text_of(results: plans.Results) -> str:
    """Which of the losses the tables are of, a key of `TEXTS`."""
    by_text = all("source" in row.get("losses", {}) for row in results.values())
    return "source" if by_text else "all"


def document(results: plans.Results, directory: str = "") -> str:
    """The law, and a table for every batch and length, each by loss.

    Args:
      results: All rows.
      directory: Of the results, as commands are to name it; empty is the usual one.
    """
    text = text_of(results)
    by_text = [comparisons.by_text(results)] if text == "source" else []
    results = comparisons.on(results, text)
    rows = sorted(results.values(), key=law.setting)
    tables_ = [
        f"## {_title(at)}\n\n{_table(list(of_setting), rows)}"
        for at, of_setting in itertools.groupby(rows, law.setting)
    ]
    sections = [
        *(law.text(results, SEEDS[text]), lengths.table(results), *by_text),
        *(comparisons.pairs(results), comparisons.parts(results)),
        *(comparisons.every_step(results), alternatives.bits(results)),
        *(alternatives.seldom(results), alternatives.signals(results)),
        *(alternatives.averages(results), alternatives.delays(results)),
        *(comparisons.ideas(results), *tables_),
    ]
    # Beside the two lines of a header.
    filled = [section for section in sections if section.count("\n|") > 2]
    return "\n\n".join([_head(rows, text, directory), *filled]) + "\n"


def _head(rows: Sequence[Row], text: str, directory: str) -> str:
    """What the tables are of, and how they are made again."""
    dates = sorted({row["date"] for row in rows})
    devices = ", ".join(sorted({row.get("device", "2 CPU cores") for row in rows}))
    plans_ = [f"study.py {x} --workers 1{_at(directory)}" for x in _plans(rows)]
    commands = [
        f"    python benchmarks/communication/{command}"
        for command in (*plans_, f"scaling.py{_at(directory)}")
    ]
    return (
        "# Longer runs and larger batches\n\n"
        f"Losses in nats a byte, {TEXTS[text]}; lower is better, of the mean of the "
        "replicas after the last step, or of their averages over the steps where "
        "'else' has a weight average. The columns 'above' compare equal seeds; "
        "'rising' is a momentum from 0.8 to 0.95. ± is the standard deviation over "
        "seeds. 'budget 0.01 1 1' spends 1% of the bytes where the relative momentum "
        "change is large, at most 1 sync ahead of what is paid for and 1 behind; other "
        "words as `runs.py` explains them. What is not said under 'else' is as in even "
        "`local_muon`.\n\n"
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {devices}; these "
        "commands train these runs and some others, and write the tables:\n\n"
        + "\n".join(commands)
    )


def _at(directory: str) -> str:
    return f" --results {directory}" if directory else ""


def _title(at: law.Setting) -> str:
    return (
        f"{at.text.capitalize() + ', width' if at.text else 'Width'} {at.width}, "
        f"{at.tokens:,} tokens a replica and step, {at.replicas} replicas, "
        f"{at.steps:,} steps"
    )


def _plans(rows: Sequence[Row]) -> list[str]:
    """What trains the rows: of every size and length the plans that add some."""
    left: dict[tuple[str, int], set[Run]] = {}
    for row in rows:
        run = Run(**row["run"])
        left.setdefault((row["size"], run.steps), set()).add(run)
    results = {row["size"] + Run(**row["run"]).key(): row for row in rows}
    found = []
    for (size, steps), runs in sorted(left.items()):
        few = ("pairs", "limits", "seldom", "large")
        for name in gap.PLANS if size in ("cpu", "cpu-32k") else few:
            plan = gap.PLANS[name]
            try:
                of_plan = set(plan(results, size, steps))
            except ValueError:  # it chooses from what was not trained
                continue
            if runs & of_plan:
                runs -= of_plan
                found.append(f"{name} --size {size} --steps {steps}")
    return found


def draw(results: plans.Results, file: Path) -> None:
    """Gap against steps by batch, and against tokens by replicas, momentum rising.

    Without points of fewer seeds than the law is fitted to.
    """
    text = text_of(results)
    gaps = law.points(*law.LINES["rising, both"], comparisons.on(results, text))
    gaps = {at: above for at, above in gaps.items() if len(above) >= SEEDS[text]}
    figure, panels = pyplot.subplots(
        1, 2, figsize=(9, 4), layout="constrained", sharey=True
    )
    for tokens in sorted({at.tokens for at in gaps if at.replicas == REPLICAS}):
        of_batch = [at for at in gaps if (at.tokens, at.replicas) == (tokens, REPLICAS)]
        xs = [at.steps for at in of_batch]
        _curve(panels[0], xs, [gaps[at] for at in of_batch], f"{tokens:,} tokens")
    short = [at for at in gaps if at.steps == bases.rising().steps]
    for replicas in sorted({at.replicas for at in short}):
        of_number = [at for at in short if at.replicas == replicas]
        xs = [at.tokens for at in of_number]
        _curve(panels[1], xs, [gaps[at] for at in of_number], f"{replicas} replicas")
    labels = (
        f"steps, {REPLICAS} replicas",
        f"tokens of a replica and step, {bases.rising().steps} steps",
    )
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(label)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_xticks(sorted({at.steps for at in gaps}))
    panels[0].set_ylabel("loss above synchronous Muon, percent")
    figure.suptitle(
        f"local_muon at 1% of the bytes, {TEXTS[text]}; mean and spread of seeds"
    )
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _curve(
    axes: Any, xs: Sequence[int], above: Sequence[Sequence[float]], label: str
) -> None:
    means = [statistics.fmean(x) for x in above]
    error = [statistics.stdev(x) if len(x) > 1 else math.nan for x in above]
    axes.errorbar(xs, means, error, marker="o", capsize=3, label=label)


def _table(rows: Sequence[Row], every: Sequence[Row]) -> str:
    """The runs of a setting, beside those of 8 replicas of its batch."""
    of_batch = [
        row for row in every if law.setting(row)[:4] == law.setting(rows[0])[:4]
    ]
    key = lambda row: Run(**row["run"]).but(seed=0).key()  # noqa: E731
    twins = [
        sorted(of_run, key=lambda row: row["run"]["seed"])
        for _, of_run in itertools.groupby(sorted(rows, key=key), key)
    ]
    twins.sort(key=lambda of_run: statistics.fmean(row["loss"] for row in of_run))
    dion = {
        row["run"]["seed"]: row["loss"]
        for row in of_batch
        if row["run"]["inner"] == "dion 1.0"
    }
    references = [
        law.losses_of(of_batch, bases.muon()),
        law.losses_of(of_batch, bases.rising_muon()),
        dion,
        law.losses_of(of_batch, bases.local_muon_evenly()),
        law.losses_of(of_batch, bases.rising()),
    ]
    return tables.markdown(HEADER, [_line(of_run, references) for of_run in twins])


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
        *(tables.percent(tables.above(by_seed, reference)) for reference in references),
        tables.losses_by_seed(by_seed),
    ]


def _else(run: Run) -> str:
    base = bases.local_muon_evenly()
    names = ("final", "other_rate", "sent_momentum", "delay", "fragments", "averaged")
    names += ("weight_average", "state")
    return ", ".join(
        f"{name.replace('_', ' ')} {getattr(run, name)}"
        for name in names
        if getattr(run, name) != getattr(base, name)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=study.RESULTS, help="directory")
    options = parser.parse_args(arguments)
    file = options.results / "scaling.jsonl"
    results = study.read(file)
    text = document(results, _named(options.results))
    draw(results, file.with_suffix(".png"))
    file.with_suffix(".md").write_text(text)
    print(text)


def _named(directory: Path) -> str:
    """As a command in the root of the repository names it, where it is in there."""
    root, there = Path(__file__).parents[2], directory.resolve()
    if there == study.RESULTS:
        return ""
    inside = there.is_relative_to(root)
    return there.relative_to(root).as_posix() if inside else str(directory)


if __name__ == "__main__":
    main()
