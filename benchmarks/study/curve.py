"""Loss over bytes: every budget with the recipe that suits it, Muon and AdamW.

    chrt --idle 0 python benchmarks/study/curve.py --workers 1    # resumes
    python benchmarks/study/curve_table.py    # the tables, and what is missing

`FORMS` are the points of the curve: methods of the library at a share of the bytes,
each with a few settings (momentum, outer step, bits) and learning rates. All of
them train for 260 steps on a seed that is not reported; between the best setting's
rates that end hardly apart 1,040 steps on that seed decide. A point's best then trains
1,040 steps on three seeds, and so do the points that are not tuned. A line for each
run goes to `results/curve.jsonl`; what is there is not trained again, and what was
stopped resumes: stop the command whenever you like. Synchronous Muon and AdamW, to
compare with, are the study's.

A run of 260 steps takes some 5 minutes of a core with AVX-512, and one of 1,040 20.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import optax
import rows
import settings
import spacing
import study
from simulate import Run

import curvadion_jax as cd
from curvadion_jax import compressors, presets, synchronizers, triggers

FILE = study.RESULTS / "curve.jsonl"
CLOSE = 0.02  # a rate that ends so little above the best after 260 steps may yet win
RISING, CONSTANT = "momentum from 0.8 to 0.95", "momentum 0.9"
NESTEROV, MEAN = "outer step 1.0, 0.4", "plain mean"
MEAN_IN_FOUR_BITS = "plain mean in 4 bits"  # half as many syncs for the bytes
# 0.14 is a sync in 4 bits after every step, 0.07 one in 2 bits.
BITS = {0.14: 4, 0.07: 2, 0.03: 2, 0.01: 2, 0.003: 2, 0.001: 2}


def momentum(setting: str, steps: int) -> Any:
    return rows.rising(steps) if setting == RISING else 0.9


def local_muon(
    budget: float, setting: str, rate: optax.Schedule, steps: int, mesh: Any
) -> optax.GradientTransformationExtraArgs:
    return cd.local_muon(
        rate,
        budget=budget,
        bits=BITS[budget],
        momentum=momentum(setting, steps),
        **rows.matrices(mesh),
    )


def muon_in_few_bits(
    budget: float, setting: str, rate: optax.Schedule, steps: int, mesh: Any
) -> optax.GradientTransformationExtraArgs:
    """Synchronous Muon, its gradients sent in few bits with error feedback."""
    return presets.synchronous_muon(
        rate,
        momentum=momentum(setting, steps),
        compressor=compressors.quantize(BITS[budget]),
        **rows.matrices(mesh),
    )


def local_adamw(
    budget: float, setting: str, rate: optax.Schedule, steps: int, mesh: Any
) -> optax.GradientTransformationExtraArgs:
    """What somebody gets who keeps AdamW: the study's, with local steps."""
    del steps
    outer = optax.sgd(1.0, 0.4, nesterov=True) if setting == NESTEROV else None
    bits = 4 if setting == MEAN_IN_FOUR_BITS else BITS[budget]
    return cd.adaptive_sync(
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0),
        triggers.evenly(budget),
        synchronizers.reconcile(outer, compressor=compressors.quantize(bits)),
        mesh,
    )


def diloco_in_two_bits(
    budget: float, setting: str, rate: optax.Schedule, steps: int, mesh: Any
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo's AdamW and outer step, within the budget in 2 bits."""
    del setting, steps
    outer = optax.sgd(0.7, 0.9, nesterov=True)
    return cd.adaptive_sync(
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0),
        triggers.evenly(budget),
        synchronizers.reconcile(outer, compressor=compressors.quantize(BITS[budget])),
        mesh,
    )


def spaced_local_muon(
    fragments: int,
    budget: float,
    setting: str,
    rate: optax.Schedule,
    steps: int,
    mesh: Any,
) -> optax.GradientTransformationExtraArgs:
    """Syncs by the root of the learning rate, of a fragment each."""
    del setting
    return spacing.local_muon(
        rate, steps, mesh, budget=budget, fragments=fragments, by_rate=True
    )


Make = Callable[[float, str, optax.Schedule, int, Any], Any]
Tried = tuple[tuple[str, tuple[float, ...]], ...]


class Form(NamedTuple):
    """A point of the curve.

    Attributes:
        name: What tables and the figure call it.
        budget: Share of the bytes.
        make: (budget, setting, learning rate, steps, mesh) -> the optimizer.
        tried: Settings, and the learning rates that are tried with each.
        decided: Those that all train on the reported seeds, where the lower mean wins.
    """

    name: str
    budget: float
    make: Make
    tried: Tried
    decided: Tried = ()

    def method(self, setting: str) -> str:
        """Its name among the methods of a run."""
        return f"{self.name}, {self.budget:.1%} of the bytes, {setting}"

    def tuning(self) -> list[Run]:
        """The runs of which the best decides its setting and learning rate."""
        return self._runs(self.tried)

    def deciding(self, results: study.Results) -> list[Run]:
        """Those of all steps: between what is named, or rates that ended close."""
        if self.decided:
            candidates, seeds = self._runs(self.decided), study.SEEDS
        else:
            candidates, seeds = self._close(results), (study.TUNING_SEED,)
        return [
            dataclasses.replace(run, seed=seed, steps=study.STEPS)
            for run in candidates
            for seed in seeds
        ]

    def _close(self, results: study.Results) -> list[Run]:
        """The tuning runs of the best setting, if several end hardly apart."""
        losses = {run: results[run]["loss"] for run in self.tuning() if run in results}
        best = min(losses, key=losses.__getitem__, default=None)
        close = [
            run
            for run, loss in losses.items()
            if best and run.method == best.method and loss <= (1 + CLOSE) * losses[best]
        ]
        return close if len(close) > 1 else []

    def _runs(self, of: Tried) -> list[Run]:
        return [
            Run(self.method(setting), rate, study.TUNING_SEED, study.QUARTER)
            for setting, rates in of
            for rate in rates
        ]

    def tried_so_far(self, results: study.Results) -> list[Run]:
        """The tuning runs that have ended, the best one first.

        Where `deciding` has runs, they decide once all have ended.
        """
        ended = [run for run in self.tuning() if run in results]
        deciding, longer = self.deciding(results), collections.defaultdict(list)
        if all(run in results for run in deciding):
            for run in deciding:
                longer[run.method, run.rate].append(results[run]["loss"])

        def place(run: Run) -> tuple[bool, float]:
            losses = longer.get((run.method, run.rate), [])
            return not losses, statistics.fmean(losses or [results[run]["loss"]])

        return sorted(ended, key=place)

    def reported(self, results: study.Results) -> list[Run]:
        """The runs of the curve, once the best setting is known."""
        there = self.tried_so_far(results)
        if len(there) < len(self.tuning()):
            return []
        if not all(run in results for run in self.deciding(results)):
            return []
        best = there[0]
        return [
            dataclasses.replace(best, seed=seed, steps=study.STEPS)
            for seed in study.SEEDS
        ]


LOCAL_MUON, FEW_BITS = "`local_muon`", "Muon in few bits"
BY_RATE = LOCAL_MUON + ", syncs by the rate"
IN_FRAGMENTS = BY_RATE + ", in 4 fragments"
LOCAL_ADAMW, DILOCO = "AdamW with local steps", "DiLoCo in 2 bits"
# The likelier first. Synchronous AdamW is best at 0.02 after 260 steps.
_OF_MUON: Tried = ((RISING, (0.04, 0.08)), (CONSTANT, (0.04, 0.08)))
_OF_ADAMW: Tried = ((MEAN, (0.02, 0.04)), (MEAN_IN_FOUR_BITS, (0.02, 0.04)))
_AT_SEVEN_PERCENT: Tried = (
    (MEAN, (0.02, 0.04, 0.01)),
    (MEAN_IN_FOUR_BITS, (0.02, 0.04)),
)
_AT_ONE_PERCENT: Tried = (
    (MEAN, (0.02, 0.04, 0.01, 0.08)),
    (MEAN_IN_FOUR_BITS, (0.02, 0.04)),
    (NESTEROV, (0.02, 0.01)),
)
# At 1% the winner on the tuning seed, and the setting that wins at all other shares.
_DECIDED_AT_ONE_PERCENT: Tried = ((MEAN, (0.04,)), (MEAN_IN_FOUR_BITS, (0.02,)))
_OF_DILOCO: Tried = (("outer step 0.7, 0.9", (0.02, 0.01)),)
FORMS = (
    *(
        Form(LOCAL_MUON, x, local_muon, _OF_MUON)
        for x in (0.07, 0.03, 0.14, 0.003, 0.01)
    ),
    Form(LOCAL_ADAMW, 0.01, local_adamw, _AT_ONE_PERCENT, _DECIDED_AT_ONE_PERCENT),
    Form(LOCAL_ADAMW, 0.07, local_adamw, _AT_SEVEN_PERCENT),
    *(Form(LOCAL_ADAMW, x, local_adamw, _OF_ADAMW) for x in (0.03, 0.003)),
    *(Form(FEW_BITS, x, muon_in_few_bits, _OF_MUON) for x in (0.07, 0.14)),
    Form(DILOCO, 0.01, diloco_in_two_bits, _OF_DILOCO),
)
# One setting and learning rate: not tuned.
UNTUNED = (
    Form(LOCAL_MUON, 0.001, local_muon, ((CONSTANT, (0.04,)),)),
    *(
        Form(name, share, functools.partial(spaced_local_muon, n), ((RISING, (x,)),))
        for name, n, share, x in (
            (BY_RATE, 1, 0.01, 0.04),
            (IN_FRAGMENTS, 4, 0.01, 0.04),
            (IN_FRAGMENTS, 4, 0.003, 0.08),
        )
    ),
)
METHODS: dict[str, rows.Method] = {
    form.method(setting): functools.partial(form.make, form.budget, setting)
    for form in (*FORMS, *UNTUNED)
    for setting, _ in form.tried
}
# What other scripts have trained by the same functions, by its name there.
ELSEWHERE = {
    rows.LOCAL_MUON: f"{LOCAL_MUON}, 1.0% of the bytes, {CONSTANT}",
    rows.LOCAL_MUON + rows.RISING: f"{LOCAL_MUON}, 1.0% of the bytes, {RISING}",
    rows.TWO_BITS: f"{FEW_BITS}, 7.0% of the bytes, {RISING}",
}
IN_SETTINGS = {
    (rows.MUON, "rising"): rows.BEST_MUON,
    (rows.LOCAL_MUON, "rising"): ELSEWHERE[rows.LOCAL_MUON + rows.RISING],
    (rows.LOCAL_MUON, 0.9): ELSEWHERE[rows.LOCAL_MUON],
}
# What the tuning runs are compared with; the reported ones have the study's rows.
REFERENCES = (
    Run(rows.BEST_MUON, 0.08, study.TUNING_SEED, study.QUARTER),
    Run(rows.ADAMW, 0.02, study.TUNING_SEED, study.QUARTER),
)


def read() -> study.Results:
    """The results so far, with those of other scripts that trained the same."""
    results = study.read(FILE)
    for run, row in study.read().items():
        if run.method in ELSEWHERE:
            same = dataclasses.replace(run, method=ELSEWHERE[run.method])
            results.setdefault(same, row)
    for row in study.rows_of(settings.FILE):
        momentum = row["settings"]["momentum"]
        method = IN_SETTINGS.get((row["method"], momentum))
        if method and row["settings"] == settings.BASE | {"momentum": momentum}:
            run = dataclasses.replace(Run(**row["run"]), method=method)
            results.setdefault(run, row)
    return results


def plan(results: study.Results) -> list[Run]:
    """What is missing, in an order in which every run is of use as soon as it ends.

    The likeliest setting at every budget first, then the other tuning runs; then what
    decides between them, and the reported runs, one seed at every budget and then the
    next; at last what is not tuned.
    """
    tuning = [form.tuning() for form in FORMS]
    first = [run for tier in itertools.zip_longest(*tuning) for run in tier if run]
    deciding = [run for form in FORMS for run in form.deciding(results)]
    reported = [form.reported(results) for form in FORMS]
    later = [run for tier in itertools.zip_longest(*reported) for run in tier if run]
    untuned = [
        Run(form.method(setting), rate, seed, study.STEPS)
        for seed in study.SEEDS
        for form in UNTUNED
        for setting, rates in form.tried
        for rate in rates
    ]
    every = dict.fromkeys([*REFERENCES, *first, *deciding, *later, *untuned])
    return [run for run in every if run not in results]


def train_one(run: Run) -> dict[str, Any]:
    """One run, in a process of its own, which finds the method by its name."""
    rows.METHODS |= METHODS
    return study.train(run)


def train(workers: int, steps: int | None) -> None:
    """Trains what is missing, and writes each result as soon as it is there.

    What comes next may depend on what was found, so it is asked for one at a time.
    """
    study.RESULTS.mkdir(exist_ok=True)
    running: dict[futures.Future, Run] = {}
    with study.processes(workers) as pool:
        while True:
            missing = [
                run
                for run in plan(read())
                if run not in running.values() and steps in (None, run.steps)
            ]
            for run in missing[: workers - len(running)]:
                running[pool.submit(train_one, run)] = run
            if not running:
                return
            for future in futures.wait(running, return_when="FIRST_COMPLETED").done:
                del running[future]
                study.keep(FILE, future.result())


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--steps", type=int, choices=(study.QUARTER, study.STEPS), help="only these"
    )
    options = parser.parse_args()
    train(options.workers, options.steps)


if __name__ == "__main__":
    main()
