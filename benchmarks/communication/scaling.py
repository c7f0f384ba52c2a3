"""The tables, the picture and the law of the plans of `gap.py`, from their results.

    python benchmarks/communication/scaling.py

Writes `results/scaling.md` and `scaling.png` beside the results, and prints the text.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import gap
import law
import plans
import study
import tables
from matplotlib import pyplot
from runs import Run

Row = tables.Row
HEADER = [
    *("method", "momentum", "rate", "outer step", "trigger", "form", "else"),
    *("bytes", "syncs", "loss", "above Muon", "above Dion"),
    *("above even `local_muon`", "above rising momentum", "loss by seed"),
]


def document(results: plans.Results) -> str:
    """The law, and a table for every batch and length, each by loss."""
    rows = sorted(results.values(), key=law.setting)
    tables_ = [
        f"## {tokens:,} tokens a replica and step, {replicas} replicas, {steps:,} steps"
        f"\n\n{_table(list(of_setting))}"
        for (tokens, replicas, steps), of_setting in itertools.groupby(
            rows, law.setting
        )
    ]
    dates = sorted({row["date"] for row in rows})
    settings = sorted(
        {(row["tokens"], row["size"], row["run"]["steps"]) for row in rows},
        key=lambda setting: (setting[0], setting[2]),
    )
    in_bfloat16 = {
        (row["size"], row["run"]["steps"])
        for row in rows
        if Run(**row["run"]).state == "bfloat16"
    }
    late = {
        (row["size"], row["run"]["steps"]) for row in rows if Run(**row["run"]).delay
    }
    commands = [
        f"    python benchmarks/communication/study.py {plan} --size {size} "
        f"--steps {steps} --workers 1"
        for _, size, steps in settings
        for plan in gap.PLANS
        if (plan, size, steps) != ("scaling", "cpu-32k", 300)
        and (plan != "memory" or (size, steps) in in_bfloat16)
        and (plan != "delays" or (size, steps) in late)
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
    return (
        "\n\n".join(
            [
                *(*head, law.text(results), parts(results)),
                *(delays(results), ideas(results), *tables_),
            ]
        )
        + "\n"
    )


def parts(results: plans.Results) -> str:
    """What is left of the gap with exact syncs, and with a sync on every step."""
    reference = results.get("cpu" + gap.muon().key())
    cells = []
    for run in (*gap.parts(), gap.rising()):
        row = results.get("cpu" + run.key())
        if row is not None and reference is not None:
            above = 100 * (row["loss"] / reference["loss"] - 1)
            cells.append(
                [
                    *(run.trigger, run.compressor, f"{tables.share(row):.2f}%"),
                    *(f"{row['loss']:.4f}", f"{above:.2f}%"),
                ]
            )
    header = ["syncs", "form", "bytes", "loss", "above synchronous Muon"]
    return (
        "## Its parts\n\n`local_muon` with a rising momentum, 1,024 tokens a replica "
        f"and step, 300 steps, seed 0.\n\n{tables.markdown(header, cells)}"
    )


def delays(results: plans.Results) -> str:
    """What it costs that syncs end some steps after they have begun."""
    cells = []
    for delay in gap.DELAYS:
        found = {
            seed: (results[key], results["cpu" + at_once.key()]["loss"])
            for seed in gap.SHORT_SEEDS
            for at_once in [gap.rising().but(seed=seed)]
            if (key := "cpu" + at_once.but(delay=delay).key()) in results
            and "cpu" + at_once.key() in results
        }
        if delay and found:
            row = found[min(found)][0]
            losses = (f"{seed}: {x['loss']:.4f}" for seed, (x, _) in found.items())
            change = (f"{100 * (x['loss'] / y - 1):.2f}%" for x, y in found.values())
            cells.append(
                [
                    *(str(delay), str(row["syncs"]), f"{tables.share(row):.2f}%"),
                    *(", ".join(losses), ", ".join(change)),
                ]
            )
    header = ["delay", "syncs", "bytes", "loss by seed", "above syncs at once"]
    return (
        "## Syncs that end later\n\n`reconcile(delay=k)`, else `local_muon` with a "
        "rising momentum, 1,024 tokens a replica and step, 300 steps, a sync about "
        "every 7. One that is due while another is under way is dropped: of a delay of "
        f"10 one every 10.\n\n{tables.markdown(header, cells)}"
    )


def ideas(results: plans.Results) -> str:
    """What was tried at the cheapest setting, by its change on the seeds of both."""
    rows = []
    for label, (run, base) in gap.tried().items():
        losses, bases = (
            {
                seed: results[key]["loss"]
                for seed in gap.SHORT_SEEDS
                if (key := "cpu" + each.but(seed=seed).key()) in results
            }
            for each in (run, base)
        )
        if both := sorted(losses.keys() & bases.keys()):
            change = [100 * (losses[seed] / bases[seed] - 1) for seed in both]
            means = [
                statistics.fmean(x[seed] for seed in both) for x in (losses, bases)
            ]
            cells = [f"{mean:.4f}" for mean in means]
            rows.append((statistics.fmean(change), label, *cells, change))
    rows.sort(key=lambda row: row[0])
    table = tables.markdown(
        ["idea", "loss with", "loss without", "change", "seeds"],
        [
            [*cells, tables.spread(change) + "%", str(len(change))]
            for _, *cells, change in rows
        ],
    )
    return (
        "## What was tried against it\n\n1,024 tokens a replica and step, 300 steps, "
        "each at 1% of the bytes but for synchronous Muon.\n\n" + table
    )


def draw(results: plans.Results, file: Path) -> None:
    """Gap against steps, a line a method and batch."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, both in law.LINES.items():
        found = law.points(*both, results)
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
                label=f"momentum {label.replace('`', '')}; {tokens:,} tokens",
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
        law.losses_of(rows, gap.muon()),
        dion,
        law.losses_of(rows, gap.local_muon_evenly()),
        law.losses_of(rows, gap.rising()),
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
        *(_above(by_seed, reference) for reference in references),
        ", ".join(f"{seed}: {loss:.4f}" for seed, loss in by_seed.items()),
    ]


def _else(run: Run) -> str:
    base = gap.local_muon_evenly()
    names = ("final", "other_rate", "sent_momentum", "delay")
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
