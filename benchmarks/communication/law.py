"""How the gap to synchronous Muon falls with tokens and steps, and the law of it."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

import gap
import numpy as np
import plans
import tables
from runs import Run
from sizes import SIZES

Row = tables.Row
Gaps = dict[tuple[int, int], list[float]]
# Label -> runs, and the synchronous ones that they are compared with, at any seed,
# batch and length.
LINES = {
    "constant, both": (gap.local_muon_evenly(), gap.muon()),
    "rising, both": (gap.rising(), gap.rising_muon()),
    "rising, `local_muon` alone": (gap.rising(), gap.muon()),
}
FITTED = ("constant, both", "rising, both")
WIDTH = 64
TARGET = (131_072, 100_000)  # 160 million parameters, 2^20 tokens a step


def setting(row: Row) -> tuple[int, int, int, int]:
    """Width of the model, tokens of a replica and step, replicas, steps."""
    width = SIZES[row["size"]].width
    return width, row["tokens"], row["run"]["replicas"], row["run"]["steps"]


def losses_of(rows: Sequence[Row], wanted: Run) -> dict[int, float]:
    """Loss by seed of those of the rows that are such a run, of any length."""
    runs = [(Run(**row["run"]), row["loss"]) for row in rows]
    return {
        run.seed: loss
        for run, loss in runs
        if run.but(seed=wanted.seed, steps=wanted.steps) == wanted
    }


def points(line: Run, reference: Run, results: plans.Results) -> Gaps:
    """Percent above the reference by tokens a replica and step, and steps."""
    found: Gaps = {}
    rows = sorted(results.values(), key=setting)
    rows = [row for row in rows if setting(row)[0] == WIDTH]
    for (_, tokens, _, steps), of_setting in itertools.groupby(rows, setting):
        of_setting = list(of_setting)
        muon = losses_of(of_setting, reference)
        losses = losses_of(of_setting, line)
        if above := [
            100 * (losses[seed] / muon[seed] - 1) for seed in losses if seed in muon
        ]:
            found[tokens, steps] = above
    return found


@dataclasses.dataclass(frozen=True)
class Law:
    """Gap = scale of the method (tokens / 1024)^-a (steps / 300)^-b, in percent."""

    scales: dict[str, float]
    a: float
    b: float

    def at(self, label: str, tokens: int, steps: int) -> float:
        """The gap at a setting."""
        decay = (tokens / 1024) ** -self.a * (steps / 300) ** -self.b
        return self.scales[label] * decay


def fit(gaps: dict[str, Gaps]) -> Law:
    """Least squares in the logarithm of the gaps; the powers are of all methods."""
    labels = list(gaps)
    features, wanted = [], []
    for label, found in gaps.items():
        for (tokens, steps), above in found.items():
            logs = -math.log(tokens / 1024), -math.log(steps / 300)
            features.append([*(float(each == label) for each in labels), *logs])
            wanted.append(math.log(statistics.fmean(above)))
    *scales, a, b = np.linalg.lstsq(np.array(features), np.array(wanted))[0]
    return Law(dict(zip(labels, map(math.exp, scales), strict=True)), a, b)


def text(results: plans.Results) -> str:
    """The gap to synchronous Muon at all settings, and the power law through it."""
    gaps = {label: points(*both, results) for label, both in LINES.items()}
    fitting = {label: gaps[label] for label in FITTED if gaps[label]}
    means = [statistics.fmean(x) for found in fitting.values() for x in found.values()]
    enough = len(means) > len(fitting) + 2 and min(means) > 0
    fitted = fit(fitting) if enough else None
    cells = [
        [
            *(label, f"{tokens:,}", f"{steps:,}", tables.spread(above) + "%"),
            str(len(above)),
            f"{fitted.at(label, tokens, steps):.2f}%"
            if fitted and label in fitting
            else "",
        ]
        for label, found in gaps.items()
        for (tokens, steps), above in found.items()
    ]
    header = ["momentum", "tokens", "steps", "above Muon", "seeds", "by the law"]
    table = f"## `local_muon` above Muon\n\n{tables.markdown(header, cells)}"
    if fitted is None:
        return table
    scales = " or ".join(f"{fitted.scales[label]:.2f}% ({label})" for label in fitting)
    far = " and ".join(f"{fitted.at(label, *TARGET):.3f}%" for label in fitting)
    return (
        f"{table}\n\nThe law: {scales} times (tokens / 1,024)^-{fitted.a:.2f} "
        f"(steps / 300)^-{fitted.b:.2f}, {len(fitting) + 2} numbers from {len(means)} "
        f"points. At {TARGET[0]:,} tokens and {TARGET[1]:,} steps it says {far}; that "
        "is some 30 and 80 times beyond what was run, and is not to be relied on."
    )
