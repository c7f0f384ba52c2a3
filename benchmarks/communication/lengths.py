"""The gap in steps: how soon synchronous Muon is where `local_muon` ends."""

import itertools
import math
from collections.abc import Mapping

import bases
import comparisons
import gap
import plans
import tables
from sizes import SIZES

_SIZES = ("cpu", "cpu-32k", "cpu-128k")
_STEPS = (150, 300, *gap.BETWEEN, 1200, 4800)


def steps_to(loss: float, ends: Mapping[int, float]) -> float | None:
    """Steps of a run that ends at a loss, from the losses at which others end.

    Between two lengths the loss is taken for a power of the steps; None outside.

    Examples:
        >>> steps_to(2.0, {100: 4.0, 400: 1.0}), steps_to(5.0, {100: 4.0, 400: 1.0})
        (200.0, None)
    """
    for short, long in itertools.pairwise(sorted(ends)):
        if ends[long] <= loss < ends[short]:
            share = math.log(ends[short] / loss) / math.log(ends[short] / ends[long])
            return short * (long / short) ** share
    return None


def table(results: plans.Results) -> str:
    """For every batch and length, the steps by seed and how many fewer they are."""
    cells = []
    for size, steps in itertools.product(_SIZES, _STEPS):
        tokens = SIZES[size].tokens // bases.rising().replicas
        local = comparisons.losses(results, size, bases.rising().but(steps=steps))
        muon = {
            length: comparisons.losses(
                results, size, bases.rising_muon().but(steps=length)
            )
            for length in _STEPS
        }
        found = {}
        for seed, loss in local.items():
            ends = {n: of_seed[seed] for n, of_seed in muon.items() if seed in of_seed}
            if (there := steps_to(loss, ends)) is not None:
                found[seed] = there
        if found:
            ratios = [steps / there for there in found.values()]
            by_seed = ", ".join(f"{seed}: {x:,.0f}" for seed, x in found.items())
            cells.append([f"{tokens:,}", f"{steps:,}", by_seed, tables.spread(ratios)])
    header = ["tokens", "steps of `local_muon`", "steps of Muon by seed", "ratio"]
    return (
        "## The gap in steps\n\nHow long a run of synchronous Muon is that ends at the "
        "loss of `local_muon`; a rising momentum and the same rate on both sides, each "
        "run with a schedule of its own. Between the lengths that were run the loss of "
        "a seed is taken for a power of the steps; shorter ones than 150 steps were "
        "not run.\n\n" + tables.markdown(header, cells)
    )
