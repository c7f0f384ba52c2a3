"""What one change does to the gap, and the gap by text: tables for `scaling.py`."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import bases
import gap
import law
import plans
import tables
from ideas import SIGNALS, tried
from runs import Run
from sizes import SIZES

Row = tables.Row
SETTINGS = (
    ("cpu", 1024, 300),
    ("cpu-32k", 4096, 300),
    ("cpu-32k", 4096, 1200),
    ("cpu-128k", 16_384, 300),
)
_ABOVE = {
    "source": "on source code",
    "all": "on all that is held out",
    "training": "on what is trained on",
}
_BY_TEXT = (
    *(bases.rising_muon(), bases.rising(), bases.rising_curvadion()),
    *(bases.rising().but(trigger=trigger) for trigger in SIGNALS),
    bases.dion("cpu-32k"),  # with the rate of the others
)
_SIZES = ("cpu", "cpu-prose", "cpu-w128", "cpu-w256")


def pairs(results: plans.Results) -> str:
    """The gap in wider models and on another text, by the rate of both."""
    cells = []
    for size, rate in itertools.product(_SIZES, (0.057, 0.08, 0.113)):
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
        muon = losses(results, size, bases.rising_muon().but(steps=steps))
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
                        tables.percent(tables.above(found, muon)),
                    ]
                )
    header = ["tokens", "steps", "syncs", "form", "besides", "bytes", "loss by seed"]
    header.append("above Muon")
    return (
        "## Its parts\n\n`local_muon` and Muon with a rising momentum. Besides: "
        "gradients that are averaged on every step, or momenta at every sync, exactly. "
        f"Rows with other seeds do not compare.\n\n{tables.markdown(header, cells)}"
    )


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


def on(results: plans.Results, text: str) -> plans.Results:
    """The rows that have a loss on a text, with that one; on 'all' they are as before.

    Examples:
        >>> rows = {"a": {"loss": 2.0, "losses": {"source": 1.0}}, "b": {"loss": 3.0}}
        >>> {key: row["loss"] for key, row in on(rows, "source").items()}
        {'a': 1.0}
    """
    if text == "all":
        return results
    return {
        key: {**row, "loss": row["losses"][text]}
        for key, row in results.items()
        if text in row.get("losses", {})
    }


def by_text(results: plans.Results) -> str:
    """The losses on source code, and what they are above Muon's on each text."""

    def place(row: Row) -> tuple[Any, ...]:
        run, method = row["run"], [*bases.SCALED.values()].index(row["method"])
        tokens, rate = SIZES[row["size"]].tokens, run["learning_rate"]
        return tokens, run["steps"], -run["replicas"], method, rate

    rows = {key: row for key, row in results.items() if "losses" in row}
    texts = {text: on(rows, text) for text in _ABOVE}
    ordered = [
        (row["size"], Run(**row["run"]).but(seed=0))
        for row in sorted(texts["source"].values(), key=place)
        if SIZES[row["size"]].width == law.WIDTH
    ]
    kinds = [x for x in dict.fromkeys(ordered) if _as_tuned(x[1]) in _BY_TEXT]
    local = [x for x in kinds if x[1].sync == "reconcile"]
    local = [x for x in local if _as_tuned(x[1]) != bases.rising()]
    text = (
        "## By text\n\nAbove synchronous Muon with the same seed and a rate of 0.08. "
        "Of the held-out bytes of the standard library 62% are English, "
        "`pydoc_data/topics.py`, and 11% tables of `encodings`, nearly the same as "
        "others that are trained on; the rest is source code. Momenta rise, but for "
        f"Dion's, 0.9.\n\n{_against('Muon', bases.rising_muon(), kinds, texts)}"
    )
    if not local:
        return text
    even = _against("even `local_muon`", bases.rising(), local, texts)
    return f"{text}\n\nAbove even `local_muon` of the same seed:\n\n{even}"


def _against(
    name: str,
    reference: Run,
    kinds: Sequence[tuple[str, Run]],
    texts: Mapping[str, plans.Results],
) -> str:
    """A table of runs of any seeds, by what they are above one with equal seeds."""
    cells = []
    for size, run in kinds:
        above = [
            tables.above(
                losses(rows, size, run),
                losses(rows, size, reference.but(steps=run.steps)),
            )
            for rows in texts.values()
        ]
        source = [*losses(texts["source"], size, run).values()]
        tokens = SIZES[size].tokens // run.replicas
        cells.append(
            [
                *(f"{tokens:,}", f"{run.steps:,}", f"{run.replicas}", _method(run)),
                *(f"{run.learning_rate}", f"{len(above[0]) or len(source)}"),
                *(tables.spread(source, digits=4), *map(tables.percent, above)),
            ]
        )
    header = ["tokens", "steps", "replicas", "method", "rate", "seeds"]
    first, *others = _ABOVE.values()
    header += ["loss on source code", f"above {name} {first}", *others]
    return tables.markdown(header, cells)


def _as_tuned(run: Run) -> Run:
    """The same at the setting and rate that the methods start from."""
    base = bases.rising()
    return run.but(
        steps=base.steps, learning_rate=base.learning_rate, replicas=base.replicas
    )


def _method(run: Run) -> str:
    by = {"budget": ", syncs by RMMC", "weighted": ", syncs by the learning rate"}
    name = bases.SCALED[run.inner]
    local = run.inner == "local_muon"
    return name + (by.get(run.trigger.split()[0], "") if local else "")


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
