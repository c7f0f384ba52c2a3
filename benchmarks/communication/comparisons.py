"""What one change does to the gap: tables of pairs of runs, for `scaling.py`."""

import itertools
import statistics

import bases
import gap
import plans
import tables
from ideas import tried
from runs import Run
from sizes import SIZES

Row = tables.Row
_SETTINGS = (("cpu", 1024, 300), ("cpu-32k", 4096, 300), ("cpu-32k", 4096, 1200))
_LONGER = (_SETTINGS[0], ("cpu", 1024, 1200), *_SETTINGS[1:])
_NAMES = {
    "budget": "relative momentum change",
    "turn": "turn of the momentum",
    "moved": "relative drift",
}


def pairs(results: plans.Results) -> str:
    """The gap in wider models and on another text, at the rate that won at width 64."""
    cells = []
    for size in ("cpu", "cpu-prose", "cpu-w128", "cpu-w256"):
        local, muon = (
            {seed: row["loss"] for seed, row in _by_seed(results, size, run).items()}
            for run in (bases.rising(), bases.rising_muon())
        )
        if both := sorted(local.keys() & muon.keys()):
            losses = [", ".join(f"{x[i]:.4f}" for i in both) for x in (local, muon)]
            above = [100 * (local[seed] / muon[seed] - 1) for seed in both]
            text = SIZES[size].data or "source code"
            width = str(SIZES[size].width)
            cells.append([text, width, *losses, tables.spread(above) + "%"])
    header = ["text", "width", "`local_muon`", "synchronous Muon", "above"]
    return (
        "## Another text, and wider models\n\nA rising momentum on both sides, 1,024 "
        "tokens a replica and step, 300 steps, by seed, two layers and heads of 32. "
        "The rate and the outer step are those of width 64 and source code. Prose: "
        "the docstrings of Python's standard library.\n\n"
        + tables.markdown(header, cells)
    )


def parts(results: plans.Results) -> str:
    """What is left of the gap with exact syncs, with more of them, or more shared."""
    cells = []
    for size, tokens, steps in _SETTINGS:
        references = [
            results.get(size + run.but(steps=steps).key())
            for run in (bases.muon(), bases.rising_muon())
        ]
        for run in (*gap.parts(), bases.rising(), *gap.shared()):
            row = results.get(size + run.but(steps=steps).key())
            if row is not None:
                # Of gradients that are averaged as well no bytes are counted.
                sent = f"{tables.share(row):.2f}%" if run.averaged == "none" else ""
                cells.append(
                    [
                        *(f"{tokens:,}", f"{steps:,}", run.trigger, run.compressor),
                        *(_besides(run), sent, f"{row['loss']:.4f}"),
                        *(_percent(row, reference) for reference in references),
                    ]
                )
    header = ["tokens", "steps", "syncs", "form", "besides", "bytes", "loss"]
    header += ["above synchronous Muon", "with a rising momentum"]
    return (
        "## Its parts\n\n`local_muon` with a rising momentum, seed 0. Besides: "
        "gradients that are averaged on every step, or momenta at every sync, exactly."
        f"\n\n{tables.markdown(header, cells)}"
    )


def _besides(run: Run) -> str:
    if run.averaged != "none":
        return f"gradients of {run.averaged}"
    return "" if run.sent_momentum == "none" else "momenta"


def _percent(row: Row, reference: Row | None) -> str:
    if reference is None:
        return ""
    return f"{100 * (row['loss'] / reference['loss'] - 1):.2f}%"


def every_step(results: plans.Results) -> str:
    """What is lost of a step where it is the mean of the replicas' own."""
    reference = results.get("cpu" + bases.rising_muon().key())
    found = [(run, results.get("cpu" + run.key())) for run in gap.every_step()]
    cells = [
        [
            run.outer,
            str(run.learning_rate),
            f"{row['loss']:.4f}",
            _percent(row, reference),
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


def _by_seed(results: plans.Results, size: str, run: Run) -> dict[int, Row]:
    """The rows of a run, of the seeds that it was trained with."""
    keys = {seed: size + run.but(seed=seed).key() for seed in gap.SHORT_SEEDS}
    return {seed: results[key] for seed, key in keys.items() if key in results}


def bits(results: plans.Results) -> str:
    """2 bits often, or 4 bits seldom, by seeds."""
    cells = []
    for size, tokens, steps in _LONGER:
        two, four = (
            _by_seed(results, size, run.but(steps=steps))
            for run in (bases.rising(), bases.rising().but(compressor="int 4"))
        )
        if both := sorted(two.keys() & four.keys()):
            changes = [100 * (four[i]["loss"] / two[i]["loss"] - 1) for i in both]
            of_form = (
                (
                    str(of[both[0]]["syncs"]),
                    ", ".join(f"{of[i]['loss']:.4f}" for i in both),
                )
                for of in (two, four)
            )
            cells.append(
                [
                    *(f"{tokens:,}", f"{steps:,}", *itertools.chain(*of_form)),
                    tables.spread(changes) + "%",
                ]
            )
    header = ["tokens", "steps", "syncs", "loss, 2 bits", "syncs", "loss, 4 bits"]
    return (
        "## Bits\n\n`local_muon` with a rising momentum at 1% of the bytes, seeds 0, 1 "
        "and 2 as far as both were run.\n\n"
        + tables.markdown([*header, "4 bits above 2"], cells)
    )


def signals(results: plans.Results) -> str:
    """What spending the same bytes by a signal changes, against even spacing."""
    cells = []
    for size, tokens, steps in (*_LONGER, ("cpu-128k", 16_384, 300)):
        even = _by_seed(results, size, bases.rising().but(steps=steps))
        for name in gap.SIGNALS:
            run = bases.rising().but(steps=steps, trigger=f"{name} {plans.BUDGET} 1 1")
            found = _by_seed(results, size, run)
            if both := sorted(found.keys() & even.keys()):
                losses = [found[seed]["loss"] for seed in both]
                pairs_ = zip(losses, (even[seed]["loss"] for seed in both), strict=True)
                row = found[both[0]]
                cells.append(
                    [
                        *(f"{tokens:,}", f"{steps:,}", _NAMES[name], str(row["syncs"])),
                        f"{tables.share(row):.2f}%",
                        ", ".join(f"{loss:.4f}" for loss in losses),
                        tables.spread([100 * (x / y - 1) for x, y in pairs_]) + "%",
                    ]
                )
    header = ["tokens", "steps", "signal", "syncs", "bytes", "loss by seed"]
    return (
        "## When to sync\n\n`local_muon` with a rising momentum; `budget` spends 1% of "
        "the bytes where a signal is large, at most 1 sync ahead of what is paid for "
        "and 1 behind. Turn: largest 1 - cos of the momentum and that after the last "
        "sync. Seeds 0, 1 and 2 as far as both were run.\n\n"
        + tables.markdown([*header, "above even spacing"], cells)
    )


def delays(results: plans.Results) -> str:
    """What it costs that syncs end some steps after they have begun."""
    cells = []
    whole = [(1, delay) for delay in gap.DELAYS if delay]
    in_turn = [(number, 0) for number in gap.TURNS]
    late = dict.fromkeys([*whole, *gap.FRAGMENTS, *in_turn])
    for (size, tokens, steps), (fragments, delay) in itertools.product(_SETTINGS, late):
        changes = {"fragments": fragments, "delay": delay}
        found = {
            seed: (results[key], results[size + at_once.key()]["loss"])
            for seed in gap.SHORT_SEEDS
            for at_once in [bases.rising().but(seed=seed, steps=steps)]
            if (key := size + at_once.but(**changes).key()) in results
            and size + at_once.key() in results
        }
        if found:
            row = found[min(found)][0]
            losses = (f"{seed}: {x['loss']:.4f}" for seed, (x, _) in found.items())
            change = (f"{100 * (x['loss'] / y - 1):.2f}%" for x, y in found.values())
            cells.append(
                [
                    *(f"{tokens:,}", f"{steps:,}", str(fragments), str(delay)),
                    *(str(row["syncs"]), f"{tables.share(row):.2f}%"),
                    *(", ".join(losses), ", ".join(change)),
                ]
            )
    header = ["tokens", "steps", "fragments", "delay", "syncs", "bytes"]
    header += ["loss by seed", "above syncs at once"]
    return (
        "## Syncs that end later\n\n`reconcile(delay=k, fragments=n)`, else "
        "`local_muon` with a rising momentum, a sync about every 7 steps, of n "
        "fragments n times as often. One that is due while another is under way is "
        "dropped: of a delay of 10 one every 10.\n\n" + tables.markdown(header, cells)
    )


def ideas(results: plans.Results) -> str:
    """What was tried at the cheapest setting, by its change on the seeds of both."""
    rows = []
    for label, (run, base) in tried().items():
        losses, bases = (
            {x: row["loss"] for x, row in _by_seed(results, "cpu", each).items()}
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
