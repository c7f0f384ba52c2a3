"""Plans at several batches and lengths: what becomes of the gap, what closes it.

Their results are together in a `scaling.jsonl`, of which `scaling.py` makes the
tables. A plan is a function of the results so far, the size and the steps.
"""

from collections.abc import Callable

import ideas
import plans
from bases import (
    diloco,
    dion,
    local_muon_evenly,
    muon,
    rising,
    rising_curvadion,
    rising_muon,
)
from plans import BUDGET
from runs import Run

BOUNDS = ("1 1", "3 3")
SEEDS = (0, 1, 2)
WIDER = ("cpu-w128", "cpu-w256")
DELAYS = (0, 1, 2, 5, 10)
FEWER_DELAYS = (0, 1, 5)  # with more tokens
# Number and delay: a sync of one comes about every 7 / number steps.
FRAGMENTS = ((2, 0), (2, 1), (2, 3), (3, 0), (3, 2))
TURNS = (3, 5)  # numbers of fragments that are compared by seeds
# The rate at the end over its peak, and the age of the averaged weights over the run.
AVERAGES = ((0.05, 0.07), (0.2, 0.07), (0.5, 0.1), (1.0, 0.1))
BETWEEN = (600, 900)  # lengths
MORE_SEEDS = (*SEEDS, 3, 4)  # of the cheapest setting and of the README's


def scaling(results: plans.Results, size: str, steps: int) -> list[Run]:
    """What is left of the gap with more steps and larger batches, by seeds.

    With 300 steps both methods' timing; with more, what of `curvadion` won there, and
    the references. Nothing else is tuned at these lengths.
    """
    local = local_muon_evenly()
    both = [local, local.but(trigger=f"budget {BUDGET} 1 1")]
    short = [
        local.but(
            inner="curvadion 1.0",
            momentum=momentum,
            trigger=f"budget {BUDGET} {bounds}",
        )
        for momentum in (0.8, 0.9)
        for bounds in BOUNDS
    ]
    if size == "cpu" and steps == local.steps:
        return [*short, *both]
    losses = {
        Run(**row["run"]): row["loss"]
        for row in results.values()
        if row["size"] == "cpu"
    }
    if any(run not in losses for run in short):
        raise ValueError("train 'scaling --size cpu --steps 300' first: it chooses")
    won = min(short, key=losses.__getitem__)
    return [
        run.but(seed=seed, steps=steps)
        for seed in SEEDS
        for run in (muon(), won, *both, dion(size))
    ]


def parts() -> list[Run]:
    """What local steps, their number and the codes lose.

    The fourth of the square, 2 bits about every 7 steps, is `rising` itself.
    """
    return [
        rising().but(trigger=trigger, compressor=compressor)
        for trigger, compressor in (
            ("always", "exact"),
            ("always", "int 2"),
            ("every 7", "exact"),
        )
    ]


def shared() -> list[Run]:
    """Exact syncs every 7 steps, and what replicas share besides."""
    base = rising().but(trigger="every 7", compressor="exact")
    return [
        base.but(averaged="others"),
        base.but(averaged="matrices"),
        base.but(sent_momentum="exact"),
    ]


def every_step() -> list[Run]:
    """Exact syncs on every step, by what is made of the mean step, seed 0."""
    return [
        rising().but(
            trigger="always", compressor="exact", outer=outer, learning_rate=rate
        )
        for outer in ("mean", "orthonormal 1.0")
        for rate in (0.08, 0.16)
    ]


def tuning(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Rate, momenta, outer step and parts at a larger batch, seed 0."""
    del results, size
    changes = [
        *({"learning_rate": rate} for rate in (0.057, 0.113)),
        {"momentum": 0.9},
        {"last_momentum": 0.98},
        *({"outer": f"nesterov 1.0 {decay}"} for decay in (0.2, 0.6)),
        {"outer": "orthonormal 1.0 0.4"},
    ]
    of_muon = [
        *({"learning_rate": rate} for rate in (0.057, 0.113, 0.16)),
        {"learning_rate": 0.113, "last_momentum": 0.98},
    ]
    runs = [
        *(run.but(seed=seed) for run in (rising(), rising_muon()) for seed in SEEDS),
        *(rising().but(**change) for change in changes),
        *(rising_muon().but(**change) for change in of_muon),
        *(run for run in parts() if run.compressor == "exact"),
    ]
    return [run.but(steps=steps) for run in runs]


def limits(results: plans.Results, size: str, steps: int) -> list[Run]:
    """What bounds the gap, by seeds; with large batches exact syncs alone."""
    del results
    if size == "cpu-128k":
        runs = [run for run in parts() if run.compressor == "exact"]
    else:
        further = [run.but(last_momentum=0.98) for run in (rising(), rising_muon())]
        runs = [*parts(), *shared(), *further]
    return [run.but(steps=steps, seed=seed) for seed in SEEDS for run in runs]


def bits(results: plans.Results, size: str, steps: int) -> list[Run]:
    """More bits in fewer syncs, of as many bytes, by seeds."""
    del results
    runs = [rising().but(steps=steps, compressor=f"int {n}") for n in (2, 4)]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def pairs(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Both with a rising momentum: wider, seed 0; prose and large batches, by seeds."""
    del results
    runs = [run.but(steps=steps) for run in (rising(), rising_muon())]
    many_tokens = size in ("cpu-128k", "cpu-512k")
    rates = (0.113,) if many_tokens else {"cpu-w128": (0.057, 0.113)}.get(size, ())
    tuned = SEEDS if size == "cpu-512k" else (0,)
    else_ = [
        run.but(learning_rate=rate, seed=seed)
        for rate in rates
        for seed in tuned
        for run in runs
    ]
    if many_tokens:
        runs.append(rising().but(steps=steps, trigger=f"budget {BUDGET} 1 1"))
    if size in WIDER:
        else_.append(rising().but(steps=steps, compressor="low_rank 0.25 4"))
    seeds = SEEDS if many_tokens or size == "cpu-prose" else (0,)
    return [run.but(seed=seed) for seed in seeds for run in runs] + else_


def shares(results: plans.Results, size: str, steps: int) -> list[Run]:
    """The batch shared among fewer and more replicas, by seeds."""
    del results, size
    runs = [rising().but(replicas=number, steps=steps) for number in (2, 4, 16)]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def against(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Rising momenta by seeds; and at the cheapest setting all that was tried."""
    del results
    runs = [rising(), rising_muon()]
    if steps == rising().steps:  # of longer runs 'scaling' has the references
        runs = [muon(), dion(size), local_muon_evenly(), *runs]
    cheapest = (size, steps) == ("cpu", rising().steps)
    of_readme = size == "cpu-32k" and steps > rising().steps
    if of_readme:
        runs += [muon(), dion(size), rising_curvadion()]
    seeds = MORE_SEEDS if cheapest or of_readme else SEEDS
    runs = [run.but(seed=seed, steps=steps) for run in runs for seed in seeds]
    if of_readme:  # the rate that won at 300 steps
        runs.append(rising_muon().but(learning_rate=0.113, steps=steps))
    tried = [run for run, _ in ideas.tried().values()]
    one_change = [run.but(seed=seed) for seed in SEEDS for run in tried]
    return [*runs, *one_change, *parts(), *every_step()] if cheapest else runs


def between(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Synchronous Muon of 600 or 900 steps, to read the gap in steps off."""
    del results, size
    if steps not in BETWEEN:
        raise ValueError(f"'between' is of {BETWEEN} steps, got {steps}")
    return [rising_muon().but(steps=steps, seed=seed) for seed in SEEDS]


def memory(results: plans.Results, size: str, steps: int) -> list[Run]:
    """All state but the anchor in bfloat16, by seeds."""
    del results, size
    half = rising().but(state="bfloat16", steps=steps)
    return [half.but(seed=seed) for seed in SEEDS]


def fragments(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Parts that come together in turn, as often each, at equal bytes, by seeds."""
    del results, size
    runs = [rising().but(steps=steps, fragments=n) for n in (1, *TURNS)]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def signals(results: plans.Results, size: str, steps: int) -> list[Run]:
    """The same bytes, spent by what asks for a sync, by seeds."""
    del results, size
    texts = (f"evenly {BUDGET}", *ideas.SIGNALS)
    runs = [rising().but(steps=steps, trigger=text) for text in texts]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def averages(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Averages of the weights in place of a rate that falls far, on both sides."""
    del results, size
    runs = [
        run.but(steps=steps, final=final, weight_average=age)
        for final, age in AVERAGES
        for run in (rising(), rising_muon())
    ]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def delays(results: plans.Results, size: str, steps: int) -> list[Run]:
    """What hiding syncs behind local steps costs, beside those that end at once."""
    del results
    cheapest = (size, steps) == ("cpu", rising().steps)
    runs = [rising().but(delay=x) for x in (DELAYS if cheapest else FEWER_DELAYS)]
    if cheapest:
        runs.append(rising().but(delay=1, seed=1))
    if steps == rising().steps:
        runs += [rising().but(fragments=n, delay=delay) for n, delay in FRAGMENTS]
    return [run.but(steps=steps) for run in runs]


def seldom(results: plans.Results, size: str, steps: int) -> list[Run]:
    """A thousandth of the bytes: changes at size `cpu`, seed 0; then by seeds what won.

    And what nothing is changed of. Give 1,200 steps or more; at `cpu` run it twice, the
    second time for the seeds.
    """
    changed = [run.but(steps=steps) for run in ideas.seldom().values()]
    if any("cpu" + run.key() not in results for run in changed):
        if size == "cpu":
            return changed
        raise ValueError(f"train 'seldom --size cpu --steps {steps}' first: it chooses")
    won = min(changed, key=lambda run: results["cpu" + run.key()]["loss"])
    both = dict.fromkeys((won, changed[0]))
    by_seed = [run.but(seed=seed) for seed in SEEDS for run in both]
    return list(dict.fromkeys([*(changed if size == "cpu" else []), *by_seed]))


def large(results: plans.Results, size: str, steps: int) -> list[Run]:
    """For an accelerator: 1% and 0.1% of the bytes, then rates, seed 0.

    Rates are guesses from smaller widths: that of matrices is about the same at any,
    and Adam's falls as the width grows.
    """
    del results
    change = {"learning_rate": 0.04, "other_rate": 0.25, "steps": steps}
    muon_, local, dion_, triggered = (
        run.but(**change)
        for run in (rising_muon(), rising(), dion(size), rising_curvadion())
    )
    adam = diloco().but(learning_rate=0.002, steps=steps)
    less = [
        run.but(trigger=run.trigger.replace(f"{BUDGET}", f"{BUDGET / 10}"))
        for run in (local, triggered, adam)
    ]
    rates = [
        run.but(learning_rate=rate, other_rate=0.01 / rate)
        for rate in (0.02, 0.08)
        for run in (muon_, local)
    ]
    more = adam.but(learning_rate=0.004)
    return [muon_, local, dion_, triggered, adam, *less, *rates, more]


PLANS: dict[str, Callable[[plans.Results, str, int], list[Run]]] = {
    plan.__name__: plan
    for plan in (
        *(between, against, scaling, memory, delays, fragments, limits),
        *(tuning, bits, pairs, shares, signals, averages, seldom, large),
    )
}
