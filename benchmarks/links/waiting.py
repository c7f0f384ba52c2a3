"""What a byte budget costs in time: the share of a step that waits for the link.

    python benchmarks/links/waiting.py

For a model, a link between 8 replicas and a budget (a share of the bytes of synchronous
training), `cost_model.py` gives the time of a step. Nothing is run, and nothing
overlaps: replicas wait for a sync and for gradients from the first byte to the last.
Frameworks overlap gradients with the backward pass, which takes at most the computation
off their time.

A sync sends the drift of the parameters in 2 bits and no momenta, as `local_muon` does;
how rare it is follows from the budget. The second of two numbers adds a vote on every
step, as `curvadion` has it. waiting.md has the assumptions and their sources.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cost_model
import measuring
from cost_model import Link, Method

REPLICAS = 8
BUDGETS = (0.1, 0.03, 0.01, 0.001)
TOLERATED = 0.05


@dataclass(frozen=True)
class Training:
    """One replica's part of a training run.

    Attributes:
        name: As in the table.
        parameters: Number of parameters.
        tokens: Tokens of a step on one replica.
        chips: Accelerators of one replica.
        chip_flops: Floating-point operations that one of them makes, a second.
    """

    name: str
    parameters: int
    tokens: int
    chips: int
    # 40% of the 989e12 of an H100 in bfloat16 without sparsity.
    chip_flops: float = 0.4 * 989e12

    @property
    def compute_time(self) -> float:
        """Forward and backward pass at 6 operations a parameter and token, seconds."""
        return 6 * self.parameters * self.tokens / (self.chips * self.chip_flops)

    @property
    def gradients(self) -> cost_model.Payload:
        """What a synchronous step averages."""
        return cost_model.gradient_payload(cost_model.ModelSize(self.parameters))

    @property
    def drift(self) -> cost_model.Payload:
        """What a sync sends."""
        return cost_model.drift_payload(self.parameters)

    @property
    def share(self) -> float:
        """Bytes of a sync over those of a synchronous step."""
        sent = cost_model.sync_bytes(self.drift, REPLICAS)
        return sent / cost_model.sync_bytes(self.gradients, REPLICAS)


TRAININGS = (
    Training("160M", 162_201_600, tokens=2**20 // REPLICAS, chips=1),
    Training("1B", 1_000_000_000, tokens=2**21 // REPLICAS, chips=8),
    Training("8B", 8_000_000_000, tokens=2**22 // REPLICAS, chips=64),
)
LINKS = {
    "10 Mb/s, 50 ms": Link(10e6, 0.05),
    "100 Mb/s, 50 ms": Link(100e6, 0.05),
    "1 Gb/s, 50 ms": Link(1e9, 0.05),
    "10 Gb/s, 50 ms": Link(10e9, 0.05),
    "1 Gb/s, 5 ms": Link(1e9, 0.005),
    "10 Gb/s, 5 ms": Link(10e9, 0.005),
}


def synchronous(training: Training, link: Link) -> Method:
    """Float32 gradients on every step."""
    sync_time = cost_model.ring_time(training.gradients, REPLICAS, link)
    return Method(training.compute_time, sync_time)


def budgeted(training: Training, link: Link, budget: float) -> tuple[Method, Method]:
    """Steps within a byte budget, without a vote and with one on every step."""
    sync_time = cost_model.ring_time(training.drift, REPLICAS, link)
    rate = min(1.0, budget / training.share)
    flags = (0.0, cost_model.flag_time(REPLICAS, link))
    return tuple(Method(training.compute_time, sync_time, rate, flag) for flag in flags)


def largest_budget(training: Training, link: Link) -> float:
    """The budget that leaves `TOLERATED` of a step without votes to the link."""
    tolerated = training.compute_time * TOLERATED / (1 - TOLERATED)
    evenly, _ = budgeted(training, link, training.share)
    return training.share * min(tolerated / evenly.sync_time, 1.0)


def rows() -> Iterator[tuple[str, ...]]:
    """The cells of the table, a row for a model and a link."""
    for training in TRAININGS:
        for name, link in LINKS.items():
            budget = largest_budget(training, link)
            yield (
                f"{training.name}, {training.compute_time:.2f} s a step",
                name,
                _percent(synchronous(training, link)),
                *(
                    " / ".join(map(_percent, budgeted(training, link, share)))
                    for share in BUDGETS
                ),
                f"{100 * budget:.2g}% ({math.ceil(training.share / budget):,})",
            )


def _percent(method: Method) -> str:
    share = method.communication_share
    if share >= 0.995:
        return ">99%"
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def table() -> list[str]:
    """The lines of a Markdown table."""
    budgets = (f"{100 * budget:g}%" for budget in BUDGETS)
    head = ("link", "all bytes", *budgets, f"waits {TOLERATED:.0%} (a sync every)")
    return [*measuring.markdown(head, measuring.grouped(rows()))]


if __name__ == "__main__":
    print("\n".join(table()))
