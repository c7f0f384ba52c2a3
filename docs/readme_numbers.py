"""The study's numbers on README and pages, from its rows.

    python docs/readme_numbers.py

Writes the tables between `<!-- table: NAME -->` and `<!-- end -->` in README and pages,
and prints the numbers that sentences there have. The zero of every number is the best
synchronous Muon, whose momentum rises from 0.8 to 0.95, of the same seed and steps; of
AdamW's table it is synchronous AdamW.
"""

import re
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "study"))

import curve
import curve_table
import measuring
import rows
import study
import table

FOUR_BITS = f"{curve.FEW_BITS}, 14.0% of the bytes, {curve.RISING}"
ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md", "docs/results.md", "docs/choose-a-budget.md")
PAGES += ("docs/from-adamw.md",)
SYNCHRONOUS = {
    rows.BEST_MUON: "Muon, momentum rising from 0.8 to 0.95",
    rows.MUON: "Muon, momentum 0.95",
    FOUR_BITS: "Muon, gradients in 4 bits",
    rows.TWO_BITS: "Muon, gradients in 2 bits",
    rows.DION: "Dion, full rank",
    rows.DION + ", rank 1/4": "Dion, rank 1/4",
    rows.ADAMW: "AdamW",
}
# Its momentum rises there.
THREE_PERCENT, ONE_PERCENT = (
    f"{curve.LOCAL_MUON}, {share:.1%} of the bytes, {curve.RISING}"
    for share in (0.03, 0.01)
)
LOCAL = {
    THREE_PERCENT: "**`local_muon(budget=0.03)`**",
    ONE_PERCENT: "**`local_muon(budget=0.01)`**",
    rows.LOCAL_MUON: "the same, momentum 0.9, rate 0.04",
    rows.MULOCO + ", 2 bits": "MuLoCo, 2 bits",
    rows.CURVADION: "`curvadion`, budget 0.01",
    rows.THRESHOLD: "`curvadion`, threshold 0.3",
    rows.LARGE_BATCH: "Muon on 7 batches, 2 bits",
    rows.MULOCO: "MuLoCo: float32, every 30 steps",
    rows.DILOCO: "DiLoCo: float32, every 30 steps",
}
FEW = (rows.BEST_MUON, FOUR_BITS, rows.TWO_BITS, rows.ADAMW)
FEW += (THREE_PERCENT, ONE_PERCENT, rows.MULOCO + ", 2 bits", rows.CURVADION)


def percent(share: float) -> str:
    """A share of the bytes, 0.994 as 99% and 0.0109 as 1.1%."""
    return f"{share:.0%}" if share > 0.1 else f"{share:.1%}"


def signed(gaps: list[float]) -> str:
    """Mean and deviation of three seeds, of fewer the values, with their sign."""
    if len(gaps) < len(study.SEEDS):
        return ", ".join(f"{gap:+.1f}%" for gap in gaps)
    return f"{statistics.fmean(gaps):+z.1f} ± {statistics.stdev(gaps):.1f}%"


def study_lines(names: Mapping[str, str]) -> Iterator[list[str]]:
    """A line for each method of the study or its curve after all steps."""
    results = study.read()
    points = curve_table.points(curve.read(), study.STEPS)
    of_curve = {of.form.method(of.setting): of.rows for of in points}
    best = table.by_seed(results, rows.BEST_MUON, study.STEPS)
    for method, name in names.items():
        runs = of_curve.get(method) or table.by_seed(results, method, study.STEPS)
        share = statistics.fmean(
            table.share_of_bytes(run, study.STEPS) for run in runs.values()
        )
        loss = statistics.fmean(run["loss"] for run in runs.values())
        zero = f"0 ({loss:.3f} nats per byte)"
        gap = zero if method == rows.BEST_MUON else signed(table.above(runs, best))
        yield [name, percent(share), gap]


def study_table(methods: Collection[str]) -> Iterator[str]:
    """These methods: synchronous ones, then those with local steps."""
    head = ("", "bytes sent", "held-out loss above the best Muon")
    groups = [
        ["**Synchronous on every step**", "", ""],
        *study_lines({x: SYNCHRONOUS[x] for x in SYNCHRONOUS if x in methods}),
        ["**Local steps, or larger batches**", "", ""],
        *study_lines({x: LOCAL[x] for x in LOCAL if x in methods}),
    ]
    return measuring.markdown(head, groups)


def budget_table() -> Iterator[str]:
    """`local_muon` by its budget, after all steps."""
    lines = []
    for of in curve_table.points(curve.read(), study.STEPS):
        if of.form.name != curve.LOCAL_MUON:
            continue
        gaps = table.above(of.rows, curve_table.reference(of.form.name, study.STEPS))
        needed = statistics.fmean(curve_table.steps_needed(of))
        settings = f"{of.setting.removeprefix('momentum ')}, {of.rate:g}"
        budget = f"{of.form.budget:.1%}".replace(".0%", "%")
        share = statistics.fmean(
            table.share_of_bytes(run, study.STEPS) for run in of.rows.values()
        )
        syncs = statistics.fmean(run["syncs"] for run in of.rows.values())
        steps = f"{study.STEPS / syncs:.2g}"
        period = "step" if steps == "1" else f"{steps} steps"
        cells = [percent(share), period, signed(gaps), f"{needed:.1f}", settings]
        lines.append([budget, *cells])
    head = (
        "`budget`",
        "bytes sent",
        "a sync every",
        "loss above the best Muon",
        "steps for one",
        "momentum, learning rate",
    )
    return measuring.markdown(head, lines)


def adamw_table() -> Iterator[str]:
    """AdamW with local steps by its share of the bytes, against synchronous AdamW.

    Of a point that is not reported yet, the best run on the seed of the tuning.
    """
    results, lines = curve.read(), []
    reported = {of.form: of for of in curve_table.points(results, study.STEPS)}
    for form in sorted(curve.FORMS, key=lambda form: -form.budget):
        if form.name not in curve_table.OF_ADAMW:
            continue
        tried = [run for run in form.tuning() if run in results]
        if of := reported.get(form):
            reference = curve_table.reference(form.name, study.STEPS)
            gaps, runs = table.above(of.rows, reference), list(of.rows.values())
            setting, rate, steps = of.setting, of.rate, f"{study.STEPS:,}"
        elif tried:
            best = min(tried, key=lambda run: results[run]["loss"])
            reference = results[curve.REFERENCES[1]]
            gaps, runs = (
                table.above({0: results[best]}, {0: reference}),
                [results[best]],
            )
            setting, rate = best.method.removeprefix(form.method("")), best.rate
            steps = f"{study.QUARTER}, seed {study.TUNING_SEED}, {len(tried)} tried"
        else:
            continue
        length = study.STEPS if of else study.QUARTER
        share = statistics.fmean(table.share_of_bytes(run, length) for run in runs)
        settings = f"{setting}, {rate:g}"
        lines.append([form.name, percent(share), signed(gaps), settings, steps])
    head = ("method", "bytes sent", "loss above sync. AdamW")
    return measuring.markdown((*head, "sync, learning rate", "steps"), lines)


TABLES = {
    "study, few rows": lambda: study_table(FEW),
    "study": lambda: study_table([*SYNCHRONOUS, *LOCAL]),
    "budgets": budget_table,
    "AdamW": adamw_table,
}


def with_tables(text: str) -> str:
    """A page's text with its tables written anew."""

    def written(found: re.Match) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- table: {found[1]} -->\n\n{lines}\n\n<!-- end -->"

    return re.sub(
        r"<!-- table: ([\w, ]+) -->.*?<!-- end -->", written, text, flags=re.S
    )


def spread(numbers: list[float], digits: int = 1) -> str:
    """Mean, standard deviation and, in brackets, the number of each seed."""
    each = ", ".join(f"{x:.{digits}f}" for x in numbers)
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f} ({each})"


def print_numbers() -> None:
    """The numbers that sentences have, by seed 0, 1 and 2."""
    results = study.read()

    def runs(method: str, steps: int = study.STEPS) -> dict[int, dict[str, Any]]:
        return table.by_seed(results, method, steps)

    short, best = runs(rows.BEST_MUON, study.QUARTER), runs(rows.BEST_MUON)
    adamw, muloco = runs(rows.ADAMW), runs(rows.MULOCO + ", 2 bits")
    by_share = {
        of.form.budget: of.rows
        for of in curve_table.points(curve.read(), study.STEPS)
        if of.form.name == curve.LOCAL_MUON
    }
    for share in (0.03, 0.01):
        name, local = f"local_muon at {share:.0%}", by_share[share]
        print(f"{name} above AdamW:", spread(table.above(local, adamw)), "%")
        gaps = table.above(runs(rows.TWO_BITS), local)
        print(f"Muon in 2 bits above {name}:", spread(gaps), "%")
    local = runs(rows.LOCAL_MUON)
    gaps = table.above(muloco, local)
    print("MuLoCo in 2 bits above local_muon with momentum 0.9:", spread(gaps), "%")
    for name in (rows.LOCAL_MUON, rows.TWO_BITS):
        needed = [
            1 / table.steps_to(run["loss"], short[seed]["loss"], best[seed]["loss"])
            for seed, run in sorted(runs(name).items())
        ]
        print(f"steps of {name} for one of the best Muon's:", spread(needed, 2))
        early = table.above(runs(name, study.QUARTER), short)
        late = table.above(runs(name), best)
        change = [after - before for before, after in zip(early, late, strict=True)]
        print(f"  its gap after {study.QUARTER} steps:", spread(early), "%")
        print(f"  the same after {study.STEPS}:", spread(late), "%")
        print("  the change in points:", spread(change))
    print("change of the loss by a momentum that rises from 0.8 to 0.95, in percent:")
    for name in (rows.MUON, rows.LOCAL_MUON):
        for steps in (study.QUARTER, study.STEPS):
            gaps = table.above(runs(name + rows.RISING, steps), runs(name, steps))
            print(f"  {name}, {steps} steps:", spread(gaps))
    for less, more in ((0.03, 0.07), (0.03, 0.14), (0.07, 0.14)):
        gaps = (table.above(by_share[share], best) for share in (less, more))
        points = spread([x - y for x, y in zip(*gaps, strict=True)])
        print(
            f"local_muon at {less:.0%} above the same at {more:.0%}, in points:", points
        )
    print("percent above the best Muon:")
    for name in rows.METHODS:
        if gaps := table.above(runs(name), best):
            print(f"  {name}: {spread(gaps)}")


def main() -> None:
    """Run the program."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
    print_numbers()


if __name__ == "__main__":
    main()
