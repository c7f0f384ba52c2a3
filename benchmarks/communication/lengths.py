"""The gap in steps: how soon synchronous Muon is where `local_muon` ends."""

import itertools
import math
from collections.abc import Mapping

import bases
import comparisons
import gap
import plans
import tables
from scipy import optimize
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


def fitted_steps_to(loss: float, ends: Mapping[int, float]) -> float | None:
    """The same by a + b / steps^c through three lengths; None where there is none.

    Those that end with the first one whose loss is no higher, or the first three.

    Examples:
        >>> ends = {n: 1 + 2 / n**0.5 for n in (100, 400, 900)}
        >>> round(fitted_steps_to(1 + 2 / 225**0.5, ends), 6)
        225.0
    """
    lengths = sorted(ends)
    long = next((k for k, n in enumerate(lengths) if ends[n] <= loss), None)
    if not long or len(lengths) < 3:
        return None
    one, two, three = lengths[max(0, long - 2) :][:3]
    share = (ends[one] - ends[two]) / (ends[one] - ends[three])

    def apart(c: float) -> float:
        return (one**-c - two**-c) / (one**-c - three**-c) - share

    low, high = 0.01, 4.0
    if not apart(low) < 0 < apart(high):
        return None
    c: float = optimize.brentq(apart, low, high, xtol=1e-12)  # pyright: ignore[reportAssignmentType]
    b = (ends[one] - ends[three]) / (one**-c - three**-c)
    return (one**-c - (ends[one] - loss) / b) ** (-1 / c)


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
        found, fitted = {}, []
        for seed, loss in local.items():
            ends = {n: of_seed[seed] for n, of_seed in muon.items() if seed in of_seed}
            if (there := steps_to(loss, ends)) is not None:
                found[seed] = there
            if (there := fitted_steps_to(loss, ends)) is not None:
                fitted.append(steps / there)
        if found:
            ratios = [steps / there for there in found.values()]
            by_seed = ", ".join(f"{seed}: {x:,.0f}" for seed, x in found.items())
            both = tables.spread(ratios), tables.spread(fitted) if fitted else ""
            cells.append([f"{tokens:,}", f"{steps:,}", by_seed, *both])
    header = ["tokens", "steps of `local_muon`", "steps of Muon by seed", "ratio"]
    header.append("ratio, by three lengths")
    return (
        "## The gap in steps\n\nHow long a run of synchronous Muon is that ends at the "
        "loss of `local_muon`; a rising momentum and the same rate on both sides, each "
        "run with a schedule of its own. Between the lengths that were run the loss of "
        "a seed is taken for a power of the steps; shorter ones than 150 steps were "
        "not run. In the last column it is a constant and a power of the steps, "
        "through three lengths, where there are so many.\n\n"
        + tables.markdown(header, cells)
    )
