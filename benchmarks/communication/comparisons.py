"""What one change does to the gap: tables of pairs of runs, for `scaling.py`."""

import itertools
import statistics
from collections.abc import Mapping

import bases
import gap
import plans
import tables
from ideas import tried
from runs import Run
from sizes import SIZES

Row = tables.Row
SETTINGS = (
    ("cpu", 1024, 300),
    ("cpu-32k", 4096, 300),
    ("cpu-32k", 4096, 1200),
    ("cpu-128k", 16_384, 300),
)
_PARTS = {
    "source": "held out, source code alone",
    "all": "held out, all",
    "training": "trained on",
}
_TEXTS = ("cpu", "cpu-prose", "cpu-w128", "cpu-w256")


def pairs(results: plans.Results) -> str:
    """The gap in wider models and on another text, by the rate of both."""
    cells = []
    for size, rate in itertools.product(_TEXTS, (0.057, 0.08, 0.113)):
        local, muon = (
            losses(results, size, run.but(learning_rate=rate))
            for run in (bases.rising(), bases.rising_muon())
        )
        if above := tables.above(local, muon):
            text = SIZES[size].data or "source code"
            at = [text, f"{SIZES[size].width}", f"{rate}"]
            cells.append([*at, *in_common(local, muon), tables.percent(above)])
    header = ["text", "width", "rate", "`local_muon`", "synchronous Muon", "above"]
    return (
        "## Another text, and wider models\n\nA rising momentum on both sides, 1,024 "
        "tokens a replica and step, 300 steps, by seed, two layers and heads of 32. "
        "The outer step is that of width 64 and source code. Prose: the docstrings of "
        "Python's standard library.\n\n" + tables.markdown(header, cells)
    )


def parts(results: plans.Results) -> str:
    """What is left of the gap with exact syncs, with more of them, or more shared."""
    cells = []
    for size, tokens, steps in SETTINGS:
        references = [
            losses(results, size, run.but(steps=steps))
            for run in (bases.muon(), bases.rising_muon())
        ]
        for run in (*gap.parts(), bases.rising(), *gap.shared()):
            rows = by_seed(results, size, run.but(steps=steps))
            if rows:
                found = {seed: row["loss"] for seed, row in rows.items()}
                # Of gradients that are averaged as well no bytes are counted.
                share = f"{tables.share(rows[min(rows)]):.2f}%"
                cells.append(
                    [
                        *(f"{tokens:,}", f"{steps:,}", run.trigger, run.compressor),
                        *(_besides(run), share if run.averaged == "none" else ""),
                        tables.losses_by_seed(found),
                        *(_above_by_seed(found, x) for x in references),
                    ]
                )
    header = ["tokens", "steps", "syncs", "form", "besides", "bytes", "loss by seed"]
    header += ["above Muon", "above Muon, rising"]
    return (
        "## Its parts\n\n`local_muon` with a rising momentum. Besides: gradients that "
        "are averaged on every step, or momenta at every sync, exactly. Losses of "
        f"different seeds do not compare.\n\n{tables.markdown(header, cells)}"
    )


def _above_by_seed(found: Mapping[int, float], references: Mapping[int, float]) -> str:
    """Percent above, one a seed, since rows have different seeds."""
    above = {
        seed: tables.above({seed: loss}, references) for seed, loss in found.items()
    }
    return ", ".join(f"{seed}: {x[0]:.2f}%" for seed, x in above.items() if x)


def _besides(run: Run) -> str:
    if run.averaged != "none":
        return f"gradients of {run.averaged}"
    return "" if run.sent_momentum == "none" else "momenta"


def every_step(results: plans.Results) -> str:
    """What is lost of a step where it is the mean of the replicas' own."""
    reference = losses(results, "cpu", bases.rising_muon())
    found = [(run, results.get("cpu" + run.key())) for run in gap.every_step()]
    cells = [
        [
            run.outer,
            str(run.learning_rate),
            f"{row['loss']:.4f}",
            tables.percent(tables.above({0: row["loss"]}, reference)),
        ]
        for run, row in found
        if row is not None
    ]
    header = ["outer step", "rate", "loss", "above synchronous Muon"]
    return (
        "## A sync on every step\n\n`local_muon` with exact syncs on every step, a "
        "rising momentum on both sides, 1,024 tokens a replica and step, 300 steps, "
        f"seed 0.\n\n{tables.markdown(header, cells)}"
    )


def by_text(results: plans.Results) -> str:
    """The losses on several texts, of `results/again`."""

    def setting(row: Row) -> tuple[int, int]:
        return row["tokens"], row["run"]["steps"]

    names, cells = [*bases.SCALED.values()], []
    rows = sorted(results.values(), key=lambda row: names.index(row["method"]))
    for at, of_setting in itertools.groupby(sorted(rows, key=setting), setting):
        kinds: dict[Run, dict[int, Row]] = {}
        for row in of_setting:
            run = Run(**row["run"])
            kinds.setdefault(run.but(seed=0), {})[run.seed] = row
        muon = kinds.get(bases.rising_muon().but(steps=at[1]), {})
        for name, label in _PARTS.items():
            for run, of_run in kinds.items():
                if losses := _on(of_run, name):
                    above = tables.percent(tables.above(losses, _on(muon, name)))
                    mean = tables.spread([*losses.values()], digits=4)
                    told = [*(f"{x:,}" for x in at), label, _method(run)]
                    rate = f"{run.learning_rate}"
                    cells.append([*told, rate, str(len(losses)), mean, above])
    header = ["tokens", "steps", "text", "method", "rate", "seeds", "loss"]
    return (
        "## By text\n\nOf the held-out bytes of the standard library 62% are English, "
        "`pydoc_data/topics.py`, and 11% tables of `encodings`, nearly the same as "
        "others that are trained on. All other tables are of the losses on everything "
        "held out. These runs are of 2026-11-26, again, with the code of that day. "
        "Momenta rise, but for Dion's, 0.9.\n\n"
        "    python benchmarks/communication/study.py against --size cpu-32k "
        "--steps 1200 --results benchmarks/communication/results/again\n\n"
        "(and `signals`, `against --size cpu` and `pairs --size cpu-512k`.)\n\n"
        + tables.markdown([*header, "above Muon"], cells)
    )


def _method(run: Run) -> str:
    by_signal = run.inner == "local_muon" and run.trigger.startswith("budget")
    return bases.SCALED[run.inner] + ", syncs by RMMC" * by_signal


def _on(rows: Mapping[int, Row], name: str) -> dict[int, float]:
    """The losses on a text by seed."""
    found = {seed: row["losses"] | {"all": row["loss"]} for seed, row in rows.items()}
    return {seed: losses[name] for seed, losses in found.items() if name in losses}


def by_seed(results: plans.Results, size: str, run: Run) -> dict[int, Row]:
    """The rows of a run, of the seeds that it was trained with."""
    keys = {seed: size + run.but(seed=seed).key() for seed in gap.MORE_SEEDS}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def losses(results: plans.Results, size: str, run: Run) -> dict[int, float]:
    """The losses of a run by seed."""
    return {seed: row["loss"] for seed, row in by_seed(results, size, run).items()}


def in_common(*by_seed: Mapping[int, float]) -> list[str]:
    """The losses of each, of the seeds that all have."""
    seeds = sorted(set.intersection(*map(set, by_seed)))
    return [", ".join(f"{x[seed]:.4f}" for seed in seeds) for x in by_seed]


def ideas(results: plans.Results) -> str:
    """What was tried at the cheapest setting, by its change on the seeds of both."""
    rows = []
    for label, (run, base) in tried().items():
        with_, without = (losses(results, "cpu", each) for each in (run, base))
        if change := tables.above(with_, without):
            both = with_.keys() & without.keys()
            means = [
                statistics.fmean(x[seed] for seed in both) for x in (with_, without)
            ]
            cells = [f"{mean:.4f}" for mean in means]
            rows.append((statistics.fmean(change), label, *cells, change))
    rows.sort(key=lambda row: row[0])
    table = tables.markdown(
        ["idea", "loss with", "loss without", "change", "seeds"],
        [
            [*cells, tables.percent(change), str(len(change))]
            for _, *cells, change in rows
        ],
    )
    return (
        "## What was tried against it\n\n1,024 tokens a replica and step, 300 steps, "
        "each at 1% of the bytes but for synchronous Muon.\n\n" + table
    )
