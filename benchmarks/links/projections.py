"""The CurvaDion paper's projected speedups, computed again from published inputs.

    python benchmarks/links/projections.py

Prints the two tables of projections.md: the paper's numbers beside those of
`cost_model.py`, and how far each input moves them. Every number below was published by
somebody else, and none was fitted to the paper's results; that page lists the sources.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cost_model
import jax
import jax.numpy as jnp
import measuring
from cost_model import Link, Method, Payload

from curvadion_jax import DimensionNumbers

TOLERANCE = 0.05
"""Relative distance up to which a projection counts as coming out."""

FAST_INFINIBAND, ACROSS_DATA_CENTRES = 1.02, 4.36
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
    },
    {
        **dict.fromkeys(["square", "mlp"], DimensionNumbers(-2, -1)),
        **dict.fromkeys(["embedding", "head"]),
    },
)
"""The 160M model of the authors' released logs."""

GRADIENTS = cost_model.gradient_payload(AUTHORS_MODEL)

# Bits per second and seconds; projections.md has the source of each.
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
        payload: What the baseline averages on every step; a sync averages gradients.
        flag_share: Time of the flag over that up a tree and down again.
    """

    link: Link
    replicas: int = 8
    sync_rate: float = 0.01
    compute_time: float = 0.298
    payload: Payload = GRADIENTS
    flag_share: float = 1.0

    def speedup(self, overlap: bool = False) -> float:
        """Speedup over synchronous training by the cost model."""
        sync_time = cost_model.ring_time(GRADIENTS, self.replicas, self.link)
        flag_time = self.flag_share * cost_model.flag_time(self.replicas, self.link)
        method = Method(self.compute_time, sync_time, self.sync_rate, flag_time)
        whole = cost_model.ring_time(self.payload, self.replicas, self.link)
        return cost_model.speedup(method, Method(self.compute_time, whole), overlap)


def comes_out(ours: float, paper: float | None) -> str:
    """Whether a speedup is within `TOLERANCE` of the paper's, where it has one."""
    if paper is None:
        return "-"
    return "yes" if abs(ours / paper - 1) <= TOLERANCE else "no"


def projections() -> Iterator[tuple[str, ...]]:
    """A row a kind of link, the fastest first."""
    for name, (link, paper) in LINKS.items():
        alone, overlapped = (Case(link).speedup(overlap) for overlap in (False, True))
        yield (
            f"{name} ({link.bandwidth / 1e9:g}, {link.round_trip_time * 1e3:g})",
            "-" if paper is None else f"{paper:.2f}",
            f"{alone:.2f}",
            f"{overlapped:.2f}",
            f"{comes_out(alone, paper)} / {comes_out(overlapped, paper)}",
        )


def sensitivity() -> Iterator[tuple[str, ...]]:
    """A row an input that varies alone, on a fast and on a slow link; no overlap."""
    for name, variants in _variations().items():
        cells = []
        for link in ("InfiniBand NDR", "regions, US east-west"):
            case, paper = Case(LINKS[link][0]), LINKS[link][1]
            found = [_with(case, fields).speedup() for fields in variants.values()]
            marks = ["*" if comes_out(x, paper) == "yes" else "" for x in found]
            cells.append(
                ", ".join(f"{x:.2f}{y}" for x, y in zip(found, marks, strict=True))
            )
        yield (name, ", ".join(variants), *cells)


def _with(case: Case, fields: dict) -> Case:
    """The case with other fields; factors for those of its link."""
    factors = {k: f * getattr(case.link, k) for k, f in fields.items() if k in _LINK}
    others = {k: value for k, value in fields.items() if k not in _LINK}
    return replace(case, link=replace(case.link, **factors), **others)


_LINK = ("bandwidth", "round_trip_time")


def _variations() -> dict[str, dict[str, dict]]:
    def scaled(name, *factors):
        return {f"x{factor:g}": {name: factor} for factor in factors}

    factors = cost_model.factor_payload(AUTHORS_MODEL, rank=1 / 8)
    rates = {"0.67%": 0.02 / 3, "1%": 0.01, "3%": 0.03}
    # Recursive doubling: partners send at once, half of the tree's messages in a row,
    # which is the least that a flag can cost.
    flags = {"tree": 1.0, "recursive doubling": 0.5, "hidden": 0.0}
    return {
        "sync rate": {text: {"sync_rate": rate} for text, rate in rates.items()},
        "compute time": {f"{x} ms": {"compute_time": x / 1e3} for x in (298, 344)},
        "replicas": {str(number): {"replicas": number} for number in (2, 4, 8, 16)},
        "bandwidth": scaled("bandwidth", 0.5, 1, 2, 4),
        "round trip": scaled("round_trip_time", 0.5, 1, 2),
        "flag": {text: {"flag_share": share} for text, share in flags.items()},
        "baseline sends": {"gradients": {}, "factors 1/8": {"payload": factors}},
    }


def tables() -> str:
    """Both, as Markdown."""
    head = ("link (Gb/s, RTT in ms)", "paper", "no overlap", "full overlap")
    other = ("input", "values", *(list(LINKS)[i] for i in (1, 6)))
    first = measuring.markdown((*head, "comes out"), projections())
    return "\n".join([*first, "", *measuring.markdown(other, sensitivity())])


if __name__ == "__main__":
    print(tables())
