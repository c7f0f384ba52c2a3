"""Which runs the study makes. A plan is a function from seeds and steps to runs.

`published` has the outer steps and intervals of the papers, not tuned here.
"""

from collections.abc import Callable, Sequence

from runs import Run

BUDGET = 0.01
RATES = (0.057, 0.08, 0.113)
ADAM_RATES = (0.01, 0.02, 0.04)
RISING = {"momentum": 0.8, "last_momentum": 0.95}
EVERY = 30

MUON = Run("muon", 0.08, **RISING)
DION = Run("dion 1.0", 0.08, momentum=0.9)
ADAMW = Run("adamw", 0.02)
LOCAL_MUON = MUON.but(
    inner="local_muon",
    trigger=f"evenly {BUDGET}",
    sync="reconcile",
    compressor="int 2",
    outer="nesterov 1.0 0.4",
)
# As `local_muon` comes: what it keeps for syncs is bfloat16, its momentum constant.
DEFAULT = LOCAL_MUON.but(
    learning_rate=0.02, momentum=0.9, last_momentum=None, state="bfloat16"
)
BY_RMMC = LOCAL_MUON.but(trigger=f"budget {BUDGET} 1 1")
CURVADION = BY_RMMC.but(inner="curvadion 1.0")
MULOCO = MUON.but(trigger=f"every {EVERY}", sync="reconcile", outer="nesterov 0.7 0.6")
DILOCO = ADAMW.but(trigger=f"every {EVERY}", sync="reconcile", outer="nesterov 0.7 0.9")

# How the tables name them, whatever else changes.
NAMES = {
    "muon": "Muon",
    "dion 1.0": "Dion",
    "dion 0.25": "Dion, rank 1/4",
    "adamw": "AdamW",
    "local_muon": "`local_muon`",
    "curvadion 1.0": "`curvadion`, rank 1.0",
}


def against(seeds: Sequence[int], steps: int) -> list[Run]:
    """`local_muon` against synchronous Muon and Dion, RMMC and `curvadion`."""
    runs = (MUON, LOCAL_MUON, DION, BY_RMMC, CURVADION)
    return [run.but(seed=seed, steps=steps) for seed in seeds for run in runs]


def rates(seeds: Sequence[int], steps: int) -> list[Run]:
    """Each method with three learning rates."""
    orthonormal = (MUON, DION, DION.but(inner="dion 0.25"), LOCAL_MUON, CURVADION)
    runs = [run.but(learning_rate=x) for run in (*orthonormal, MULOCO) for x in RATES]
    runs += [run.but(learning_rate=x) for run in (ADAMW, DILOCO) for x in ADAM_RATES]
    return [run.but(seed=seed, steps=steps) for seed in seeds for run in runs]


def published(seeds: Sequence[int], steps: int) -> list[Run]:
    """Synchronous AdamW, DiLoCo, MuLoCo, and `local_muon` as it comes."""
    runs = (ADAMW, DILOCO, MULOCO, DEFAULT)
    return [run.but(seed=seed, steps=steps) for seed in seeds for run in runs]


def parts(seeds: Sequence[int], steps: int) -> list[Run]:
    """What local steps, their number and the codes lose, beside `against`."""
    forms = (("always", "exact"), ("always", "int 2"), ("every 7", "exact"))
    return [
        LOCAL_MUON.but(trigger=trigger, compressor=form, seed=seed, steps=steps)
        for seed in seeds
        for trigger, form in forms
    ]


def replicas(seeds: Sequence[int], steps: int) -> list[Run]:
    """`local_muon` with other numbers of replicas on the same batches."""
    return [
        LOCAL_MUON.but(replicas=number, seed=seed, steps=steps)
        for seed in seeds
        for number in (2, 4, 16)
    ]


def lengths(seeds: Sequence[int], steps: int) -> list[Run]:
    """Shorter runs of synchronous Muon, for the gap in steps."""
    shorter = (steps // 8, steps // 4, steps // 2, 3 * steps // 4)
    return [MUON.but(steps=number, seed=seed) for seed in seeds for number in shorter]


def seldom(seeds: Sequence[int], steps: int) -> list[Run]:
    """A thousandth of the bytes: as it is, and in 4 bits with less outer momentum."""
    base = LOCAL_MUON.but(trigger="evenly 0.001", steps=steps)
    four = base.but(compressor="int 4", outer="nesterov 1.0 0.2")
    return [run.but(seed=seed) for seed in seeds for run in (base, four)]


PLANS: dict[str, Callable[[Sequence[int], int], list[Run]]] = {
    plan.__name__: plan
    for plan in (against, rates, published, parts, replicas, lengths, seldom)
}
