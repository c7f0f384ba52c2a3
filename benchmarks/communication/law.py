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

Row = tables.Row
Gaps = dict[tuple[int, int], list[float]]
# What the law is fitted to, at any seed, batch and length.
LINES = {"`local_muon`": gap.local_muon_evenly(), "rising momentum": gap.rising()}
TARGET = (131_072, 100_000)  # 160 million parameters, 2^20 tokens a step


def setting(row: Row) -> tuple[int, int, int]:
    """Tokens of a replica and step, replicas, steps."""
    return row["tokens"], row["run"]["replicas"], row["run"]["steps"]


def losses_of(rows: Sequence[Row], wanted: Run) -> dict[int, float]:
    """Loss by seed of those of the rows that are such a run, of any length."""
    runs = [(Run(**row["run"]), row["loss"]) for row in rows]
    return {
        run.seed: loss
        for run, loss in runs
        if run.but(seed=wanted.seed, steps=wanted.steps) == wanted
    }


def points(line: Run, results: plans.Results) -> Gaps:
    """Percent above synchronous Muon by tokens a replica and step, and steps."""
    found: Gaps = {}
    rows = sorted(results.values(), key=setting)
    for (tokens, _, steps), of_setting in itertools.groupby(rows, setting):
        of_setting = list(of_setting)
        muon = losses_of(of_setting, gap.muon())
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
    gaps = {label: points(line, results) for label, line in LINES.items()}
    gaps = {label: found for label, found in gaps.items() if found}
    means = [statistics.fmean(x) for found in gaps.values() for x in found.values()]
    enough = len(means) > len(gaps) + 2 and min(means) > 0
    fitted = fit(gaps) if enough else None
    header = ["method", "tokens", "steps", "above Muon", "seeds", "by the law"]
    cells = [
        [
            *(label, f"{tokens:,}", f"{steps:,}", tables.spread(above) + "%"),
            *(str(len(above)), f"{fitted.at(label, *at):.2f}%" if fitted else ""),
        ]
        for label, found in gaps.items()
        for at, above in found.items()
        for tokens, steps in [at]
    ]
    table = f"## Above synchronous Muon\n\n{tables.markdown(header, cells)}"
    if fitted is None:
        return table
    scales = " or ".join(f"{fitted.scales[label]:.2f}% ({label})" for label in gaps)
    far = " and ".join(f"{fitted.at(label, *TARGET):.3f}%" for label in gaps)
    return (
        f"{table}\n\nThe law: {scales} times (tokens / 1,024)^-{fitted.a:.2f} "
        f"(steps / 300)^-{fitted.b:.2f}, {len(gaps) + 2} numbers from {len(means)} "
        f"points. At {TARGET[0]:,} tokens and {TARGET[1]:,} steps it says {far}; that "
        "is some 30 and 80 times beyond what was run, and is not to be relied on."
    )
