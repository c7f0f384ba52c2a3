"""How the gap to synchronous Muon falls with tokens and steps, and the law of it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import bases
import numpy as np
import plans
import tables
from runs import Run
from scipy import optimize
from sizes import SIZES

Row = tables.Row
# Label -> runs, and the synchronous ones that they are compared with, at any seed,
# batch and length.
LINES = {
    "constant, both": (bases.local_muon_evenly(), bases.muon()),
    "rising, both": (bases.rising(), bases.rising_muon()),
    "rising, `local_muon` alone": (bases.rising(), bases.muon()),
}
FITTED = ("constant, both", "rising, both")
WIDTH = 64


class Setting(NamedTuple):
    """What runs that are compared have in common, but for the number of replicas."""

    text: str
    width: int
    batch: int
    steps: int
    replicas: int

    @property
    def tokens(self) -> int:
        """Of a replica and step."""
        return self.batch // self.replicas


TARGET = Setting("", WIDTH, 2**20, 100_000, 8)  # 160 million parameters
Gaps = dict[Setting, list[float]]


def setting(row: Row) -> Setting:
    """That of a result."""
    size, run = SIZES[row["size"]], Run(**row["run"])
    return Setting(size.data or "", size.width, size.tokens, run.steps, run.replicas)


def losses_of(rows: Sequence[Row], wanted: Run) -> dict[int, float]:
    """Loss by seed of those of the rows that are such a run, of any length."""
    runs = [(Run(**row["run"]), row["loss"]) for row in rows]
    return {
        run.seed: loss
        for run, loss in runs
        if run.but(seed=wanted.seed, steps=wanted.steps) == wanted
    }


def points(line: Run, reference: Run, results: plans.Results) -> Gaps:
    """Percent above the reference, of the same batch, by setting."""
    found: Gaps = {}
    rows = [row for row in results.values() if setting(row)[:2] == ("", WIDTH)]
    rows.sort(key=setting)
    for _, of_batch in itertools.groupby(rows, lambda row: setting(row)[:4]):
        of_batch = list(of_batch)
        muon = losses_of(of_batch, reference)
        for at, of_setting in itertools.groupby(of_batch, setting):
            losses = losses_of(list(of_setting), line.but(replicas=at.replicas))
            if above := tables.above(losses, muon):
                found[at] = above
    return found


@dataclasses.dataclass(frozen=True)
class Law:
    """A gap in percent as a product of powers.

    scale of the method (tokens / 1024)^-a (steps / 300)^-b (replicas / 8)^c
    """

    scales: dict[str, float]
    a: float
    b: float
    c: float

    def at(self, label: str, setting: Setting) -> float:
        """The gap at a setting."""
        decay = (setting.tokens / 1024) ** -self.a * (setting.steps / 300) ** -self.b
        return self.scales[label] * decay * (setting.replicas / 8) ** self.c


def fit(gaps: dict[str, Gaps]) -> Law | None:
    """Least squares over the gaps of all seeds; the powers are of all methods.

    Not in their logarithms, of which a gap near zero would decide alone: so a setting
    weighs by its seeds, and large gaps more than small ones. None where the settings
    do not tell the powers apart.
    """
    labels = list(gaps)
    seen = [
        (labels.index(label), at.tokens / 1024, at.steps / 300, at.replicas / 8, gap)
        for label, found in gaps.items()
        for at, above in found.items()
        for gap in above
    ]
    which, tokens, steps, replicas, wanted = map(np.array, zip(*seen, strict=True))

    def apart(numbers: np.ndarray) -> np.ndarray:
        *scales, a, b, c = numbers
        return np.array(scales)[which] * tokens**-a * steps**-b * replicas**c - wanted

    start = [*(5.0 for _ in labels), 0.5, 0.5, 0.5]
    tight = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-14)
    found = optimize.least_squares(apart, start, **tight)
    if np.linalg.matrix_rank(found.jac) < len(start):
        return None
    *scales, a, b, c = found.x.tolist()
    return Law(dict(zip(labels, scales, strict=True)), a, b, c)


def _without_one(gaps: dict[str, Gaps]) -> str:
    """In which ranges the powers stay where any one setting is left out."""
    laws = [
        fit(gaps | {label: {at: x for at, x in found.items() if at != left_out}})
        for label, found in gaps.items()
        for left_out in found
    ]
    powers = [[law.a, law.b, law.c] for law in laws if law is not None]
    if not powers:
        return ""
    ranges = [f"{min(x):.2f} to {max(x):.2f}" for x in zip(*powers, strict=True)]
    return f"Without any one setting the powers are {', '.join(ranges)}. "


def text(results: plans.Results, seeds: int) -> str:
    """The gap to synchronous Muon at all settings, and the power law through it.

    Args:
      results: All rows.
      seeds: The fewest of a setting that the law is fitted to.
    """
    gaps = {label: points(*both, results) for label, both in LINES.items()}
    several = {
        label: {at: x for at, x in gaps[label].items() if len(x) >= seeds}
        for label in FITTED
    }
    fitting = {label: found for label, found in several.items() if len(found) > 1}
    settings = sum(map(len, fitting.values()))
    fitted = fit(fitting) if settings > len(fitting) + 3 else None
    cells = [
        [
            *(label, f"{at.tokens:,}", str(at.replicas), f"{at.steps:,}"),
            *(tables.spread(above) + "%", str(len(above))),
            f"{fitted.at(label, at):.2f}%" if fitted and label in fitting else "",
        ]
        for label, found in gaps.items()
        for at, above in found.items()
    ]
    header = ["momentum", "tokens", "replicas", "steps", "above Muon", "seeds"]
    table = tables.markdown([*header, "by the law"], cells)
    table = f"## `local_muon` above Muon\n\n{table}"
    if fitted is None:
        return table
    scales = " or ".join(f"{fitted.scales[label]:.2f}% ({label})" for label in fitting)
    of = f" of {seeds} seeds or more" if seeds > 1 else ""
    far = " and ".join(f"{fitted.at(label, TARGET):.3f}%" for label in fitting)
    return (
        f"{table}\n\nThe law: {scales} times (tokens / 1,024)^-{fitted.a:.2f} "
        f"(steps / 300)^-{fitted.b:.2f} (replicas / 8)^{fitted.c:.2f}, "
        f"{len(fitting) + 3} numbers from the {settings} settings{of}. "
        f"{_without_one(fitting)}At {TARGET.tokens:,} "
        f"tokens, {TARGET.replicas} replicas and {TARGET.steps:,} steps it says {far}; "
        "that is far beyond what was run, and is not to be relied on."
    )
