"""The tables of the curve: loss over bytes, how it was tuned, and what is missing.

    python benchmarks/study/curve_table.py

Writes `curve.md` beside the results, from what `curve.py` and the study have trained so
far, and `steps.json` there: how many steps of `local_muon` and of Muon in few bits
replace one of the best synchronous Muon, which `cost_model.py` reads.
`docs/pictures/make.py` draws the curve.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import cost_model
import curve
import measuring
import rows
import study
import table
import waiting
from curve import FEW_BITS, FORMS, LOCAL_ADAMW, LOCAL_MUON, UNTUNED, Form
from simulate import Run

STEPS_FILE = study.RESULTS / "steps.json"
# What the curve aims at: percent above the best synchronous Muon, by budget.
GOALS = {0.14: 2.0, 0.07: 3.5, 0.03: 5.0, 0.01: 7.5, 0.003: 11.0}
OF_ADAMW = (LOCAL_ADAMW, curve.DILOCO)
# Methods of the study that the curve is compared with, with their own settings.
OTHERS = (rows.MULOCO + ", 2 bits", rows.MULOCO, rows.LARGE_BATCH)
OTHERS_OF_ADAMW = (rows.DILOCO,)
ROUND_TRIP = 0.05  # seconds, of the links that are compared


class Point(NamedTuple):
    """A form of the curve with one setting and learning rate.

    Attributes:
        form: Name and share of the bytes.
        setting, rate: Of the runs.
        best_of: Of how many tuning runs theirs is the best; 0 if it is not.
        tried: Whether it is one of them.
        rows: The runs' results by seed.
    """

    form: Form
    setting: str
    rate: float
    best_of: int
    tried: bool
    rows: Mapping[int, Mapping[str, Any]]


def point(form: Form, results: study.Results, steps: int) -> Point | None:
    """What there is of a form after so many steps; None if nothing is.

    The best of its tuning runs, if there are several and it has rows; else the setting
    with most seeds.
    """
    tried, found = form.tried_so_far(results), []
    all_tried = [(run.method, run.rate) for run in tried] if len(tried) > 1 else []
    best = next(iter(all_tried), None)
    for setting, _ in form.tried:
        for rate in sorted({run.rate for run in results}):
            runs = [
                Run(form.method(setting), rate, seed, steps) for seed in study.SEEDS
            ]
            known = {run.seed: results[run] for run in runs if run in results}
            best_of = len(tried) if best == (form.method(setting), rate) else 0
            is_tried = (form.method(setting), rate) in all_tried
            if known:
                found.append(Point(form, setting, rate, best_of, is_tried, known))
    return max(found, key=_preference, default=None)


def _preference(of: Point) -> tuple[int, int, float]:
    mean = statistics.fmean(row["loss"] for row in of.rows.values())
    return of.best_of, len(of.rows), -mean


def recipe(of: Point) -> str:
    """Its setting and learning rate, and how they were chosen."""
    chosen = "one of those tried" if of.tried else "not tuned"
    if of.best_of:
        chosen = f"best of {of.best_of}"
        if of.form.decided:
            chosen = "the better of two on these seeds"
    return f"{of.setting}, {of.rate:g} ({chosen})"


def points(results: study.Results, steps: int) -> list[Point]:
    """All that there are, with falling bytes."""
    forms = sorted((*FORMS, *UNTUNED), key=lambda form: (form.name, -form.budget))
    found = (point(form, results, steps) for form in forms)
    return [each for each in found if each is not None]


def reference(name: str, steps: int) -> dict[int, dict]:
    """The study's synchronous rows that a form is compared with."""
    method = rows.ADAMW if name in OF_ADAMW else rows.BEST_MUON
    return table.by_seed(study.read(), method, steps)


def spread(numbers: Sequence[float], digits: int = 1, unit: str = "%") -> str:
    """Mean and standard deviation of three seeds; of fewer the values.

    Examples:
        >>> spread([1.0, 2.0, 3.0]), spread([1.0, 2.0]), spread([])
        ('2.0 ± 1.0%', '1.0, 2.0%', '')
    """
    if len(numbers) >= len(study.SEEDS):
        return table.spread(numbers, digits, unit)
    return ", ".join(f"{x:.{digits}f}" for x in numbers) + unit * bool(numbers)


def steps_needed(of: Point) -> list[float]:
    """Steps for one of the best Muon's, by seed, of runs of all steps."""
    short, long = (reference(of.form.name, n) for n in (study.QUARTER, study.STEPS))
    return [
        1 / table.steps_to(row["loss"], short[seed]["loss"], long[seed]["loss"])
        for seed, row in sorted(of.rows.items())
        if seed in short and seed in long
    ]


def curve_lines(results: study.Results, steps: int, adamw: bool) -> Iterator[list[str]]:
    """The cells of the curve's table, of Muon's methods or of AdamW's."""
    for of in points(results, steps):
        if (of.form.name in OF_ADAMW) != adamw:
            continue
        gaps = table.above(of.rows, reference(of.form.name, steps))
        share = statistics.fmean(
            table.share_of_bytes(row, steps) for row in of.rows.values()
        )
        long = steps == study.STEPS and not adamw
        yield [
            *(f"{of.form.name}, {of.form.budget:.1%}", f"{share:.2%}"),
            recipe(of),
            spread(gaps),
            *[spread(steps_needed(of), 2, "")] * long,
        ]
    others = OTHERS_OF_ADAMW if adamw else OTHERS
    against = table.by_seed(
        study.read(), rows.ADAMW if adamw else rows.BEST_MUON, steps
    )
    for method in others:
        runs = table.by_seed(study.read(), method, steps)
        share = statistics.fmean(table.share_of_bytes(x, steps) for x in runs.values())
        gaps = table.above(runs, against)
        rate = f"the study's, {study.best_rate(study.read(), method, steps):g}"
        long = steps == study.STEPS and not adamw
        yield [method, f"{share:.2%}", rate, spread(gaps), *[""] * long]


def tuning_lines(results: study.Results) -> Iterator[list[str]]:
    """Loss by setting and learning rate, of a form that has any."""
    muon, adamw = (results.get(run) for run in curve.REFERENCES)
    for form in FORMS:
        base = adamw if form.name in OF_ADAMW else muon
        cells = []
        for run in form.tuning():
            setting = run.method.removeprefix(form.method(""))
            if run in results:
                loss = results[run]["loss"]
                gap = f" ({loss / base['loss'] - 1:+.1%})" if base else ""
                cells.append(f"{setting}, {run.rate:g}: {loss:.4f}{gap}")
            longer = dataclasses.replace(run, steps=study.STEPS)
            if longer in results:
                loss = results[longer]["loss"]
                cells[-1] += f", after {study.STEPS:,} steps {loss:.4f}"
        if cells:
            yield [form.name, f"{form.budget:.1%}", "; ".join(cells)]


def state_lines(results: study.Results) -> Iterator[list[str]]:
    """What is trained and what is missing."""
    for form in FORMS:
        tuned = sum(run in results for run in form.tuning())
        deciding = form.deciding(results)
        decided = sum(run in results for run in deciding)
        there = point(form, results, study.STEPS)
        seeds = len(there.rows) if there else 0
        yield [
            *(form.name, f"{form.budget:.1%}", f"{tuned} of {len(form.tuning())}"),
            f"{decided} of {len(deciding)}" if deciding else "",
            f"{seeds} of {len(study.SEEDS)}",
        ]


def first_lines(results: study.Results) -> Iterator[list[str]]:
    """By link speed and model: what reaches a loss first, and how much sooner."""
    known = [cost_model.Measured(**each) for each in steps_by_budget(results)]
    for speed in cost_model.SPEEDS:
        cells = [cost_model.in_bits(speed)]
        for training in waiting.TRAININGS:
            of_link = cost_model.compare(
                *(training.parameters, training.compute_time),
                cost_model.Link(speed, ROUND_TRIP),
                known=known,
            )
            first = cost_model.fastest(of_link)
            synchronous = cost_model.fastest(of_link, synchronous=True)
            gain = synchronous.time_to_loss / first.time_to_loss
            name = first.name.removesuffix(" of the bytes")
            name = name.removesuffix(" behind the backward pass")
            cells.append(name if first.synchronous else f"{name} ({gain:.2g})")
        yield cells


HEADER = ("method, budget", "bytes", "recipe", "above", "steps for one")


def document(results: study.Results) -> str:
    """All tables."""
    dates = sorted({row["date"] for row in study.read(curve.FILE).values()})
    goals = ", ".join(f"{goal:g}% at {share:.1%}" for share, goal in GOALS.items())
    parts = [
        "# Loss over bytes\n\nWritten by `curve_table.py`; rows of `curve.py` "
        f"({' to '.join(dict.fromkeys((dates[0], dates[-1])))}) and of the study. "
        "*Above* is the held-out loss above the best synchronous Muon (momentum "
        "from 0.8 to 0.95), or above synchronous AdamW, of the same seed and steps: "
        "mean ± standard deviation of the paired differences of three seeds, of fewer "
        "the values, from seed 0 on. *Bytes* have the mean of the replicas that ends "
        "local steps. *Steps for one* are the steps that are worth one of the best "
        f"Muon's. What `local_muon` aims at after {study.STEPS:,} steps: {goals}.",
    ]
    for steps in (study.STEPS, study.QUARTER):
        for adamw in (False, True):
            lines = [*curve_lines(results, steps, adamw)]
            if lines:
                against = "synchronous AdamW" if adamw else "the best synchronous Muon"
                title = f"## {steps:,} steps, above {against}"
                header = HEADER[: len(lines[0])]
                text = "\n".join(measuring.markdown(header, lines))
                parts.append(f"{title}\n\n{text}")
    models = (f"{x.name}, {x.compute_time:.2f} s a step" for x in waiting.TRAININGS)
    first = measuring.markdown(("link, 50 ms", *models), first_lines(results))
    parts.append(
        "## Which share reaches a loss first\n\nCalculated from the column of steps, 8 "
        "replicas (`cost_model.py`, for your own model and link); in brackets how many "
        "times as fast as the fastest without local steps. A share with one seed "
        "counts like the others.\n\n" + "\n".join(first)
    )
    tuning = measuring.markdown(("method", "budget", "losses"), tuning_lines(results))
    seed, quarter = study.TUNING_SEED, study.QUARTER
    parts.append(
        f"## Tuning\n\nSeed {seed}, {quarter} steps; in brackets above the reference "
        "on that seed.\n\n" + "\n".join(tuning)
    )
    head = ("method", "budget", "tuning runs", "deciding runs", "reported runs")
    missing = measuring.markdown(head, state_lines(results))
    parts.append(
        f"## What is trained\n\nTuning runs have {quarter} steps. Where rates of the "
        f"best setting end within {curve.CLOSE:.0%} of each other, runs of "
        f"{study.STEPS:,} steps on seed {seed} decide between them. For AdamW at 1.0% "
        "the best setting and that of all other shares both train on the reported "
        "seeds, and the lower mean is reported. "
        "Reported runs are of three seeds and as long.\n\n" + "\n".join(missing)
    )
    return "\n\n".join(parts) + "\n"


def steps_by_budget(results: study.Results) -> list[dict[str, Any]]:
    """What the calculator reads: by method and budget, of runs of all steps."""
    return [
        {
            "method": of.form.name,
            "budget": of.form.budget,
            "bits": curve.BITS[of.form.budget],
            # Fewer than the best Muon's are luck: its own seeds differ by as much.
            "steps": max(1.0, round(statistics.fmean(needed), 2)),
            "seeds": len(needed),
        }
        for of in points(results, study.STEPS)
        if of.form.name in (LOCAL_MUON, FEW_BITS) and (needed := steps_needed(of))
    ]


def main() -> None:
    """Run the program."""
    results = curve.read()
    text = document(results)
    (study.RESULTS / "curve.md").write_text(text)
    lines = ",\n".join(f" {json.dumps(each)}" for each in steps_by_budget(results))
    STEPS_FILE.write_text(f"[\n{lines}\n]\n")
    print(text)


if __name__ == "__main__":
    main()
