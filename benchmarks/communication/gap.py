"""Plans at several batches and lengths: what becomes of the gap, what closes it.

Their results are together in `results/scaling.jsonl`, of which `scaling.py` makes the
tables. A plan is a function of the results so far, the size and the steps.
"""

from collections.abc import Callable

import plans
from plans import BUDGET, METHODS
from runs import Run

# How the tables name the methods.
SCALED = {
    "muon": "Muon, synchronous",
    "dion 1.0": "Dion, synchronous",
    "local_muon": "`local_muon`",
    "curvadion 1.0": "`curvadion`, rank 1.0",
}
BOUNDS = ("1 1", "3 3")
SEEDS = (0, 1, 2)
DELAYS = (0, 1, 2, 5, 10)
FEWER_DELAYS = (0, 1, 5)  # with more tokens
# Number and delay: a sync of one comes about every 7 / number steps.
FRAGMENTS = ((2, 0), (2, 1), (2, 3), (3, 0), (3, 2))
TURNS = (3, 5)  # numbers of fragments that are compared by seeds
SHORT_SEEDS = (*SEEDS, 3, 4)  # of the cheapest setting


def muon() -> Run:
    """Synchronous Muon with the values that won at size `cpu`."""
    return METHODS["muon"].run.but(learning_rate=0.08, momentum=0.8)


def dion(size: str) -> Run:
    """Synchronous Dion with the rate that won at this size."""
    return METHODS["dion"].run.but(learning_rate=0.04 if size == "cpu" else 0.08)


def local_muon_evenly() -> Run:
    """What lost least at size `cpu`."""
    return METHODS["local_muon"].run.but(
        inner="local_muon", momentum=0.8, outer="nesterov 1.0 0.4"
    )


def rising() -> Run:
    """The same with a momentum that rises, which lost less."""
    return local_muon_evenly().but(last_momentum=0.95)


def rising_muon() -> Run:
    """Synchronous Muon with a momentum that rises alike."""
    return muon().but(last_momentum=0.95)


def rising_curvadion() -> Run:
    """`curvadion` with that momentum, and the bounds that won at size `cpu`."""
    return rising().but(inner="curvadion 1.0", trigger=f"budget {BUDGET} 1 1")


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


def tried() -> dict[str, tuple[Run, Run]]:
    """Ideas against the gap, one at a time: with it and without, 300 steps, seed 0."""
    muon_, even, better = muon(), local_muon_evenly(), rising()
    changes = {
        "momentum from 0.8 to 0.95": (even, {"last_momentum": 0.95}),
        "momentum from 0.8 to 0.95, synchronous Muon": (muon_, {"last_momentum": 0.95}),
        "momentum from 0.8 to 0.98": (better, {"last_momentum": 0.98}),
        "momentum from 0.7 to 0.95": (better, {"momentum": 0.7}),
        "rate down to 0.2 of its peak": (even, {"final": 0.2}),
        "rate down to 0.2, rising momentum": (better, {"final": 0.2}),
        "rate down to 0, rising momentum": (better, {"final": 0.0}),
        "peak rate 0.057": (better, {"learning_rate": 0.057}),
        "peak rate 0.113": (better, {"learning_rate": 0.113}),
        "half the rate for embeddings, head, norms": (even, {"other_rate": 0.5}),
        "outer momentum 0.4 to 0": (better, {"outer": "nesterov 1.0 0.4 1.0 0.0"}),
        "outer momentum 0.2 to 0.6": (better, {"outer": "nesterov 1.0 0.2 1.0 0.6"}),
        "outer momentum 0.5": (better, {"outer": "nesterov 1.0 0.5"}),
        "outer momentum 0.3": (better, {"outer": "nesterov 1.0 0.3"}),
        "outer rate 1.4, peak rate 0.057": (
            better,
            {"outer": "nesterov 1.4 0.4", "learning_rate": 0.057},
        ),
        "outer rate 2, peak rate 0.04": (
            better,
            {"outer": "nesterov 2.0 0.4", "learning_rate": 0.04},
        ),
        "orthonormal outer step": (better, {"outer": "orthonormal 1.0 0.4"}),
        "orthonormal outer step, 1.4": (better, {"outer": "orthonormal 1.4 0.4"}),
        "orthonormal outer step, 1.4, peak rate 0.057": (
            better,
            {"outer": "orthonormal 1.4 0.4", "learning_rate": 0.057},
        ),
        "syncs as the learning rate": (even, {"trigger": f"weighted {BUDGET} 1.0"}),
        "syncs as the learning rate to -1/2": (
            better,
            {"trigger": f"weighted {BUDGET} -0.5"},
        ),
        "syncs as the relative momentum change": (
            even,
            {"trigger": f"budget {BUDGET} 1 1"},
        ),
        "momenta sent too, 1 bit": (better, {"sent_momentum": "int 1"}),
        "momenta sent too, 2 bits, from 0.9": (
            better,
            {"momentum": 0.9, "sent_momentum": "int 2"},
        ),
        "1 bit, outer momentum 0.2": (
            better,
            {"compressor": "int 1", "outer": "nesterov 1.0 0.2"},
        ),
        "scales of blocks of 1,024": (even, {"compressor": "int 2 2 1024"}),
    }
    return {
        label: (base.but(**change), base) for label, (base, change) in changes.items()
    }


def parts() -> list[Run]:
    """What local steps, their number and the codes lose, seed 0.

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
    """Exact syncs every 7 steps, and what replicas share besides, seed 0."""
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
    """What bounds the gap: its parts, and a momentum that rises further, seed 0."""
    del results, size
    further = [run.but(last_momentum=0.98) for run in (rising(), rising_muon())]
    return [run.but(steps=steps) for run in (*parts(), *shared(), *further)]


def bits(results: plans.Results, size: str, steps: int) -> list[Run]:
    """More bits in fewer syncs, of as many bytes, by seeds."""
    del results
    runs = [rising().but(steps=steps, compressor=f"int {n}") for n in (2, 4)]
    return [run.but(seed=seed) for seed in SEEDS for run in runs]


def pairs(results: plans.Results, size: str, steps: int) -> list[Run]:
    """Both with a rising momentum: wider, seed 0; prose and large batches, by seeds."""
    del results
    runs = [run.but(steps=steps) for run in (rising(), rising_muon())]
    other_rate = []
    if size == "cpu-128k":
        other_rate = [run.but(learning_rate=0.113, seed=0) for run in runs]
        runs.append(rising().but(steps=steps, trigger=f"budget {BUDGET} 1 1"))
    seeds = SEEDS if size in ("cpu-prose", "cpu-128k") else (0,)
    return [run.but(seed=seed) for seed in seeds for run in runs] + other_rate


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
    seeds = SHORT_SEEDS if cheapest else SEEDS
    runs = [run.but(seed=seed, steps=steps) for run in runs for seed in seeds]
    if size == "cpu-32k" and steps > rising().steps:
        triggered = rising_curvadion().but(steps=steps)
        runs += [triggered.but(seed=seed) for seed in SEEDS]
        # The rate that won at 300 steps.
        runs.append(rising_muon().but(learning_rate=0.113, steps=steps))
    ideas = [run for run, _ in tried().values()]
    return [*runs, *ideas, *parts(), *every_step()] if cheapest else runs


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


PLANS: dict[str, Callable[[plans.Results, str, int], list[Run]]] = {
    plan.__name__: plan
    for plan in (
        *(against, scaling, memory, delays, fragments, limits),
        *(tuning, bits, pairs, shares),
    )
}
