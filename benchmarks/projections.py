"""The CurvaDion paper's projected speedups, computed again from published inputs.

    python benchmarks/projections.py

Prints the two tables of docs/projections.md: the paper's numbers beside those of
`curvadion_jax.cost_model`, and how far each input moves them. Every number below was
published by somebody else, and none was fitted to the paper's results; that page lists
the sources, the rule by which each was taken, and what could not be found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from curvadion_jax import cost_model
from curvadion_jax.cost_model import Link, Method

TOLERANCE = 0.05
"""Relative distance up to which a projection counts as coming out."""

FAST_INFINIBAND = 1.02
ACROSS_DATA_CENTRES = 4.36
"""The two projections of the paper that we know of (a factor each)."""

AUTHORS_MODEL = cost_model.model_size(
    # 12 layers of width 768 are in the authors' configuration. That there are four
    # square matrices and two of 3072 x 768 in a layer, and an embedding and a head of
    # 50,304 x 768, is inferred: it gives their logged byte count exactly.
    {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in {
            "square": (48, 768, 768),
            "mlp": (24, 3072, 768),
            "embedding": (50_304, 768),
            "head": (50_304, 768),
        }.items()
    }
)
"""The 160M model of the authors' released logs."""

# Bits per second and seconds; docs/projections.md has the source of each.
LINKS: dict[str, tuple[Link, float | None]] = {
    "NVLink 4 in one node": (Link(3600e9, 1.2e-6), None),
    "InfiniBand NDR": (Link(400e9, 1.2e-6), FAST_INFINIBAND),
    "InfiniBand HDR": (Link(200e9, 1.2e-6), FAST_INFINIBAND),
    "100 Gb/s Ethernet": (Link(100e9, 500e-6), None),
    "25 Gb/s Ethernet": (Link(25e9, 500e-6), None),
    "10 Gb/s Ethernet": (Link(10e9, 500e-6), None),
    "regions, US east-west": (Link(5e9, 69e-3), ACROSS_DATA_CENTRES),
    "regions, US-Europe": (Link(5e9, 84e-3), ACROSS_DATA_CENTRES),
}


@dataclass(frozen=True)
class Case:
    """Inputs of one projection; the defaults are the published ones.

    Attributes:
        link: The link between replicas.
        replicas: Number of replicas; 8 GPUs in the authors' logs.
        sync_rate: Share of the steps that sync; the abstract's "99% communication
            reduction" leaves 0.01.
        compute_time: Seconds of a step without communication; the authors' truly local
            run (H=50).
        sync_payload: Bytes of a sync; from the authors' logs.
        baseline_payload: Bytes that the baseline all-reduces on every step.
        flag_share: Time of the flag, beside that up a tree and down again.
    """

    link: Link
    replicas: int = 8
    sync_rate: float = 0.01
    compute_time: float = 0.298
    sync_payload: float = 648_806_400
    baseline_payload: float = 648_806_400
    flag_share: float = 1.0

    def speedup(self, overlap: bool = False) -> float:
        """Speedup over synchronous training by the cost model."""
        sync_time = cost_model.ring_time(self.sync_payload, self.replicas, self.link)
        flag_time = self.flag_share * cost_model.flag_time(self.replicas, self.link)
        method = Method(self.compute_time, sync_time, self.sync_rate, flag_time)
        whole = cost_model.ring_time(self.baseline_payload, self.replicas, self.link)
        return cost_model.speedup(method, Method(self.compute_time, whole), overlap)


@dataclass(frozen=True)
class Projection:
    """One row of the comparison with the paper.

    Attributes:
        name: The kind of link.
        link: Its published bandwidth and round-trip time.
        paper: The paper's projected speedup; None where we know of none.
        ours: The cost model's speedup if nothing overlaps.
        ours_overlapped: The cost model's speedup if all communication overlaps.
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


def projections() -> list[Projection]:
    """The paper's speedups beside ours, a row a kind of link, the fastest first."""
    return [
        Projection(name, link, paper, Case(link).speedup(), Case(link).speedup(True))
        for name, (link, paper) in LINKS.items()
    ]


@dataclass(frozen=True)
class Sensitivity:
    """How the speedups, without overlap, follow one input; the others stay put.

    Attributes:
        name: The input that is varied.
        values: Its values, as text.
        fast: Speedup on InfiniBand NDR for each value.
        slow: Speedup between regions on the east and west coast of the USA for each.
    """

    name: str
    values: tuple[str, ...]
    fast: tuple[float, ...]
    slow: tuple[float, ...]


def sensitivity() -> list[Sensitivity]:
    """Speedups on a fast and on a slow link, a row an input that varies alone."""
    fast, slow = (
        Case(LINKS[name][0]) for name in ("InfiniBand NDR", "regions, US east-west")
    )
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

    gradients = cost_model.gradient_payload(AUTHORS_MODEL)
    factors = cost_model.factor_payload(AUTHORS_MODEL, rank=1 / 8)
    return {
        "sync rate": field(
            "sync_rate", ("0.67%", 0.02 / 3), ("1%", 0.01), ("3%", 0.03)
        ),
        "compute time": field("compute_time", ("298 ms", 0.298), ("344 ms", 0.344)),
        "replicas": field("replicas", ("2", 2), ("4", 4), ("8", 8), ("16", 16)),
        "bandwidth": scaled("bandwidth", 0.5, 1, 2, 4),
        "round trip": scaled("round_trip_time", 0.5, 1, 2),
        # Recursive doubling: partners send at once, half of the tree's messages in a
        # row, which is the least that a flag can cost.
        "flag": field(
            "flag_share", ("tree", 1.0), ("recursive doubling", 0.5), ("hidden", 0.0)
        ),
        "baseline sends": field(
            "baseline_payload", ("gradients", gradients), ("factors 1/8", factors)
        ),
    }


def projections_table() -> str:
    """The comparison with the paper, "comes out" without and with full overlap."""
    head = ("link", "Gb/s", "RTT ms", "paper", "no overlap", "full overlap")
    rows = [
        (
            row.name,
            f"{row.link.bandwidth / 1e9:g}",
            f"{row.link.round_trip_time * 1e3:g}",
            "-" if row.paper is None else f"{row.paper:.2f}",
            f"{row.ours:.2f}",
            f"{row.ours_overlapped:.2f}",
            f"{_answer(row.comes_out)} / {_answer(row.comes_out_overlapped)}",
        )
        for row in projections()
    ]
    return _table((*head, "comes out"), rows, left={0, 6})


def sensitivity_table() -> str:
    """Speedups as one input varies; a star marks what is within 5% of the paper's."""
    head = ("input", "values", "InfiniBand NDR", "regions, US east-west")
    rows = [
        (
            row.name,
            ", ".join(row.values),
            _starred(row.fast, FAST_INFINIBAND),
            _starred(row.slow, ACROSS_DATA_CENTRES),
        )
        for row in sensitivity()
    ]
    return _table(head, rows, left={0, 1, 2, 3})


def _starred(speedups: tuple[float, ...], paper: float) -> str:
    return ", ".join(
        f"{ours:.2f}{'*' if within_tolerance(ours, paper) else ''}" for ours in speedups
    )


def _answer(comes_out: bool | None) -> str:
    return {None: "-", True: "yes", False: "no"}[comes_out]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: set[int]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return " | ".join(padded).rstrip()

    rule = "-|-".join("-" * width for width in widths)
    return "\n".join([line(head), rule, *map(line, rows)])


if __name__ == "__main__":
    print(projections_table())
    print()
    print(sensitivity_table())
