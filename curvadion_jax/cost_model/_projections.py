"""The CurvaDion paper's projected speedups, computed again from published inputs.

Every number below was published by somebody else, and none was fitted to the paper's
results; docs/projections.md lists the sources, the rule by which each was taken, and
what could not be found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from curvadion_jax.cost_model._links import (
    Link,
    recursive_doubling_time,
    ring_time,
    tree_time,
)
from curvadion_jax.cost_model._size import (
    FLAG_BYTES,
    MatrixShape,
    ModelSize,
    factor_payload,
    gradient_payload,
)
from curvadion_jax.cost_model._steps import Method, speedup

TOLERANCE = 0.05
"""Relative distance up to which a projection counts as coming out."""

FAST_INFINIBAND = 1.02
ACROSS_DATA_CENTRES = 4.36
"""The two projections of the paper that we know of (a factor each)."""

AUTHORS_MODEL = ModelSize(
    # 12 layers of width 768 are in the authors' configuration. That there are four
    # square matrices and two of 3072 x 768 in a layer, and an embedding and a head of
    # 50,304 x 768, is inferred: it gives their logged byte count exactly.
    matrices=(MatrixShape(48, 768, 768), MatrixShape(24, 3072, 768)),
    other_elements=2 * 50_304 * 768,
)
"""The 160M model of the authors' released logs."""

# Bits per second and seconds; docs/projections.md has the source of each.
_PUBLISHED_LINKS: tuple[tuple[str, Link, float | None], ...] = (
    ("NVLink 4 in one node", Link(3600e9, 1.2e-6), None),
    ("InfiniBand NDR", Link(400e9, 1.2e-6), FAST_INFINIBAND),
    ("InfiniBand HDR", Link(200e9, 1.2e-6), FAST_INFINIBAND),
    ("100 Gb/s Ethernet", Link(100e9, 500e-6), None),
    ("25 Gb/s Ethernet", Link(25e9, 500e-6), None),
    ("10 Gb/s Ethernet", Link(10e9, 500e-6), None),
    ("regions, US east-west", Link(5e9, 69e-3), ACROSS_DATA_CENTRES),
    ("regions, US-Europe", Link(5e9, 84e-3), ACROSS_DATA_CENTRES),
)


@dataclass(frozen=True)
class Case:
    """Inputs of one projection; the defaults are the published ones.

    Args:
      link: The link between replicas.
      replicas: Number of replicas; 8 GPUs in the authors' logs.
      sync_rate: Share of the steps that sync; the abstract's "99% communication
        reduction" leaves 0.01.
      compute_time: Seconds of a step without communication; the authors' truly local
        run (H=50).
      sync_payload: Bytes of a sync; from the authors' logs.
      baseline_payload: Bytes that the baseline all-reduces on every step.
      flag_algorithm: Time of the flag, as `tree_time`.
    """

    link: Link
    replicas: int = 8
    sync_rate: float = 0.01
    compute_time: float = 0.298
    sync_payload: float = 648_806_400
    baseline_payload: float = 648_806_400
    flag_algorithm: Callable[[float, int, Link], float] = tree_time

    def speedup(self, overlap: bool = False) -> float:
        """Speedup over synchronous training by the cost model."""
        sync_time = ring_time(self.sync_payload, self.replicas, self.link)
        flag_time = self.flag_algorithm(FLAG_BYTES, self.replicas, self.link)
        method = Method(self.compute_time, sync_time, self.sync_rate, flag_time)
        baseline_time = ring_time(self.baseline_payload, self.replicas, self.link)
        return speedup(method, Method(self.compute_time, baseline_time), overlap)


@dataclass(frozen=True)
class Projection:
    """One row of the comparison with the paper.

    Args:
      name: The kind of link.
      link: Its published bandwidth and round-trip time.
      paper: The paper's projected speedup; None where we know of none.
      ours: The cost model's speedup if nothing overlaps.
      ours_overlapped: The cost model's speedup if all communication overlaps.

    Examples:
      >>> from curvadion_jax.cost_model import Link, Projection
      >>> row = Projection("slow", Link(5e9, 0.07), 4.0, ours=4.1, ours_overlapped=6.0)
      >>> row.comes_out, row.comes_out_overlapped
      (True, False)
    """

    name: str
    link: Link
    paper: float | None
    ours: float
    ours_overlapped: float

    @property
    def comes_out(self) -> bool | None:
        """Whether `ours` is within 5% of the paper; None where it states nothing."""
        return within_tolerance(self.ours, self.paper)

    @property
    def comes_out_overlapped(self) -> bool | None:
        """Whether `ours_overlapped` is within 5% of the paper, or None."""
        return within_tolerance(self.ours_overlapped, self.paper)


def within_tolerance(ours: float, paper: float | None) -> bool | None:
    """Whether a speedup is within `TOLERANCE` of the paper's; None if it has none."""
    return None if paper is None else abs(ours / paper - 1) <= TOLERANCE


def published_projections() -> list[Projection]:
    """The paper's projected speedups beside those of this cost model.

    Returns:
      One row a kind of link, from the fastest to the slowest.

    Examples:
      >>> from curvadion_jax.cost_model import published_projections
      >>> for row in published_projections():
      ...     if row.paper:
      ...         print(f"{row.name}: {row.paper} in the paper, {row.ours:.2f} here")
      InfiniBand NDR: 1.02 in the paper, 1.08 here
      InfiniBand HDR: 1.02 in the paper, 1.15 here
      regions, US east-west: 4.36 in the paper, 4.92 here
      regions, US-Europe: 4.36 in the paper, 4.71 here
    """
    return [
        Projection(name, link, paper, Case(link).speedup(), Case(link).speedup(True))
        for name, link, paper in _PUBLISHED_LINKS
    ]


@dataclass(frozen=True)
class Sensitivity:
    """How the speedups, without overlap, follow one input; the others stay put.

    Args:
      name: The input that is varied.
      values: Its values, as text.
      fast: Speedup on InfiniBand NDR for each value.
      slow: Speedup between regions on the east and west coast of the USA for each.

    Examples:
      >>> from curvadion_jax.cost_model import Sensitivity
      >>> row = Sensitivity("replicas", ("2", "8"), fast=(1.0, 1.1), slow=(3.7, 4.9))
      >>> dict(zip(row.values, row.slow, strict=True))
      {'2': 3.7, '8': 4.9}
    """

    name: str
    values: tuple[str, ...]
    fast: tuple[float, ...]
    slow: tuple[float, ...]


def published_sensitivity() -> list[Sensitivity]:
    """Speedups on a fast and on a slow link as each input varies on its own.

    Returns:
      One row an input.

    Examples:
      >>> from curvadion_jax.cost_model import published_sensitivity
      >>> row = published_sensitivity()[0]
      >>> print(row.name, row.values, [round(x, 2) for x in row.slow])
      sync rate ('0.67%', '1%', '3%') [4.99, 4.92, 4.53]
    """
    links = {name: link for name, link, _ in _PUBLISHED_LINKS}
    fast = Case(links["InfiniBand NDR"])
    slow = Case(links["regions, US east-west"])
    return [
        Sensitivity(
            name,
            tuple(variants),
            tuple(vary(fast).speedup() for vary in variants.values()),
            tuple(vary(slow).speedup() for vary in variants.values()),
        )
        for name, variants in _variations().items()
    ]


def _variations() -> dict[str, dict[str, Callable[[Case], Case]]]:
    def field(name, *pairs):
        return {
            text: lambda case, value=value: replace(case, **{name: value})
            for text, value in pairs
        }

    def scaled(name, *factors):
        def scale(case, factor):
            value = factor * getattr(case.link, name)
            return replace(case, link=replace(case.link, **{name: value}))

        return {f"x{f:g}": lambda case, f=f: scale(case, f) for f in factors}

    def no_flag(payload, replicas, link):
        return 0.0

    gradients = gradient_payload(AUTHORS_MODEL)
    factors = factor_payload(AUTHORS_MODEL, rank=1 / 8)
    return {
        "sync rate": field(
            "sync_rate", ("0.67%", 0.02 / 3), ("1%", 0.01), ("3%", 0.03)
        ),
        "compute time": field("compute_time", ("298 ms", 0.298), ("344 ms", 0.344)),
        "replicas": field("replicas", ("2", 2), ("4", 4), ("8", 8), ("16", 16)),
        "bandwidth": scaled("bandwidth", 0.5, 1, 2, 4),
        "round trip": scaled("round_trip_time", 0.5, 1, 2),
        "flag": field(
            "flag_algorithm",
            ("tree", tree_time),
            ("recursive doubling", recursive_doubling_time),
            ("hidden", no_flag),
        ),
        "baseline sends": field(
            "baseline_payload", ("gradients", gradients), ("factors 1/8", factors)
        ),
    }
