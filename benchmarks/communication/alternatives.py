"""Other settings at equal bytes, by seeds: tables for `scaling.py`."""

import itertools
import statistics

import bases
import gap
import ideas
import plans
import tables
from comparisons import SETTINGS, by_seed, in_common, losses

_LONGER = (SETTINGS[0], ("cpu", 1024, 1200), *SETTINGS[1:])
_EVERY = (
    *(*_LONGER, ("cpu", 1024, 4800)),
    *(("cpu-128k", 16_384, 1200), ("cpu-512k", 65_536, 300)),
)
_BOTH = (bases.rising(), bases.rising_muon())


def bits(results: plans.Results) -> str:
    """2 bits often, or 4 bits seldom, by seeds."""
    cells = []
    for size, tokens, steps in _LONGER:
        runs = [bases.rising().but(steps=steps, compressor=f"int {n}") for n in (2, 4)]
        two, four = (losses(results, size, run) for run in runs)
        if above := tables.above(four, two):
            first = min(two.keys() & four.keys())
            syncs = [str(by_seed(results, size, run)[first]["syncs"]) for run in runs]
            of_form = zip(syncs, in_common(two, four), strict=True)
            at = [f"{tokens:,}", f"{steps:,}"]
            cells.append([*at, *itertools.chain(*of_form), tables.percent(above)])
    header = ["tokens", "steps", "syncs", "loss, 2 bits", "syncs", "loss, 4 bits"]
    return (
        "## Bits\n\n`local_muon` with a rising momentum at 1% of the bytes, seeds 0, 1 "
        "and 2 as far as both were run.\n\n"
        + tables.markdown([*header, "4 bits above 2"], cells)
    )


def signals(results: plans.Results) -> str:
    """What spending the same bytes by a signal changes, against even spacing."""
    cells = []
    for size, tokens, steps in _EVERY:
        even = losses(results, size, bases.rising().but(steps=steps))
        for trigger, name in ideas.SIGNALS.items():
            run = bases.rising().but(steps=steps, trigger=trigger)
            rows = by_seed(results, size, run).values()
            rows = [row for row in rows if row["run"]["seed"] in even]
            if above := tables.above(losses(results, size, run), even):
                cells.append(
                    [
                        *(f"{tokens:,}", f"{steps:,}", name),
                        f"{statistics.fmean(row['syncs'] for row in rows):.0f}",
                        f"{statistics.fmean(map(tables.share, rows)):.2f}%",
                        ", ".join(f"{row['loss']:.4f}" for row in rows),
                        tables.percent(above),
                    ]
                )
    header = ["tokens", "steps", "signal", "syncs", "bytes", "loss by seed"]
    return (
        "## When to sync\n\n`local_muon` with a rising momentum; `budget` spends 1% of "
        "the bytes where a signal is large, at most 1 sync ahead of what is paid for "
        "and 1 behind. Turn: largest 1 - cos of the momentum and that after the last "
        "sync. The learning rate is known before: syncs are as frequent as its root is "
        "high. Seeds 0, 1 and 2 as far as both were run.\n\n"
        + tables.markdown([*header, "above even spacing"], cells)
    )


def seldom(results: plans.Results) -> str:
    """What a thousandth of the bytes loses, and what changes to it bring."""
    cells = []
    changed = ideas.seldom()
    plain = next(iter(changed.values()))
    for (size, tokens, steps), (label, run) in itertools.product(
        _EVERY, changed.items()
    ):
        if rows := by_seed(results, size, run.but(steps=steps)):
            found = {seed: row["loss"] for seed, row in rows.items()}
            runs = [x.but(steps=steps) for x in (plain, *_BOTH)]
            above = [tables.above(found, losses(results, size, x)) for x in runs]
            row = rows[min(rows)]
            cells.append(
                [
                    *(f"{tokens:,}", f"{steps:,}", label, str(row["syncs"])),
                    f"{tables.share(row):.2f}%",
                    tables.losses_by_seed(found),
                    *map(tables.percent, above),
                ]
            )
    header = ["tokens", "steps", "changed", "syncs", "bytes", "loss by seed"]
    header += ["above nothing changed", "above 1% of the bytes", "above Muon"]
    return (
        "## A thousandth of the bytes\n\n`local_muon` with a rising momentum and even "
        "syncs in 2 bits, and what was changed; on equal seeds above the same "
        "where nothing is changed, that at 1%, and synchronous Muon.\n\n"
        + tables.markdown(header, cells)
    )


def averages(results: plans.Results) -> str:
    """What averaged weights change on both sides, and what becomes of the gap."""
    cells = []
    for (size, tokens, steps), (final, age) in itertools.product(_LONGER, gap.AVERAGES):
        plain, averaged = (
            [losses(results, size, run.but(steps=steps, **change)) for run in _BOTH]
            for change in ({}, {"final": final, "weight_average": age})
        )
        changes = map(tables.above, averaged, plain)
        if gap_ := tables.above(*averaged):
            seeds = averaged[0].keys() & averaged[1].keys()
            cells.append(
                [
                    *(f"{tokens:,}", f"{steps:,}", f"{final}", f"{age}"),
                    *in_common(*averaged),
                    *map(tables.percent, (*changes, gap_)),
                    tables.percent(
                        tables.above({x: plain[0][x] for x in seeds}, plain[1])
                    ),
                ]
            )
    header = ["tokens", "steps", "rate at the end", "age", "`local_muon`", "Muon"]
    header += ["change of `local_muon`", "of Muon", "gap", "gap without"]
    return (
        "## Averaged weights\n\nThe loss of an exponential average of the weights over "
        "the steps, whose age is a share of the run, and of the replicas' mean. The "
        "rate ends at a share of its peak (else 0.05). Both sides have a rising "
        "momentum, `local_muon` 1% of the bytes; by seed. The mean of the averages at "
        "the end, one all-reduce, is not counted.\n\n" + tables.markdown(header, cells)
    )


def delays(results: plans.Results) -> str:
    """What it costs that syncs end some steps after they have begun."""
    cells = []
    whole = [(1, delay) for delay in gap.DELAYS if delay]
    in_turn = [(number, 0) for number in gap.TURNS]
    late = dict.fromkeys([*whole, *gap.FRAGMENTS, *in_turn])
    for (size, tokens, steps), (fragments, delay) in itertools.product(SETTINGS, late):
        at_once = bases.rising().but(steps=steps)
        run = at_once.but(fragments=fragments, delay=delay)
        references = losses(results, size, at_once)
        found = {
            seed: row
            for seed, row in by_seed(results, size, run).items()
            if seed in references
        }
        if above := tables.above(losses(results, size, run), references):
            row = found[min(found)]
            by_loss = tables.losses_by_seed(
                {seed: x["loss"] for seed, x in found.items()}
            )
            change = (f"{x:.2f}%" for x in above)
            cells.append(
                [
                    *(f"{tokens:,}", f"{steps:,}", str(fragments), str(delay)),
                    *(str(row["syncs"]), f"{tables.share(row):.2f}%"),
                    *(by_loss, ", ".join(change)),
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
