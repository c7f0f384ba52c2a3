"""What a byte budget costs in time: the share of a step that waits for the link.

    python benchmarks/links.py

For a model, a link between 8 replicas and a budget (a share of the bytes of synchronous
training), `curvadion_jax.cost_model` gives the time of a step. Nothing is run, and
nothing overlaps but what is said to: replicas wait for a sync and for gradients
from the first byte to the last. Frameworks overlap gradients with the backward pass,
which takes at most the computation off their time.

A sync sends parameters in 2 bits and no momenta (`reconcile(compressor=quantize(2),
momentum=False)`); how rare it is follows from the budget. The three numbers for a
budget, one where they are the same, differ in the flag: asked for on every step, hidden
behind the computation (`triggers.delayed`), and asked for as rarely as it is needed,
once a period (`ask_every`). Two columns are of syncs that would hide behind local steps
(`reconcile(delay=k)`): how many take as long as a sync, and what waits still at 1% and
0.1% of the bytes where each sync hid behind all steps until the next. docs/links.md
has the assumptions on models and links, and their sources.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from curvadion_jax import compressors, cost_model
from curvadion_jax.cost_model import Link, Method

REPLICAS = 8
BUDGETS = (0.1, 0.01, 0.001)
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
    sync_time = cost_model.ring_time(_gradients(training), REPLICAS, link)
    return Method(training.compute_time, sync_time)


def budgeted(training: Training, link: Link, budget: float) -> dict[str, Method]:
    """Steps within a byte budget, for the flag 'asked', 'hidden' and 'rare'."""
    payload = _sync_payload(training)
    sync_time = cost_model.ring_time(payload, REPLICAS, link)
    rate = min(1.0, budget / _sync_share(training))
    flags = {
        "asked": {},
        "hidden": {"hidden_behind": training.compute_time},
        "rare": {"ask_every": math.floor(1 / rate)},
    }
    return {
        name: Method(
            training.compute_time,
            sync_time,
            rate,
            cost_model.flag_time(REPLICAS, link, **arguments),
        )
        for name, arguments in flags.items()
    }


def _sync_payload(training: Training) -> compressors.Payload:
    parameters = jax.ShapeDtypeStruct((training.parameters,), jnp.float32)
    return compressors.quantize(2).payload(parameters, {})


def _gradients(training: Training) -> int:
    return cost_model.gradient_payload(cost_model.model_size(training.parameters))


def _sync_share(training: Training) -> float:
    """Bytes of a sync over those of a synchronous step."""
    sent = cost_model.sync_bytes(_sync_payload(training), REPLICAS)
    return sent / cost_model.sync_bytes(_gradients(training), REPLICAS)


def hiding_steps(training: Training, link: Link) -> int:
    """Steps that take at least as long as a sync: a delay that hides it."""
    sync_time = cost_model.ring_time(_sync_payload(training), REPLICAS, link)
    return math.ceil(sync_time / training.compute_time)


def hidden(training: Training, link: Link, budget: float) -> float:
    """Share of a step that waits if each sync hides behind all steps until the next."""
    method = budgeted(training, link, budget)["hidden"]
    behind = Method(method.compute_time, method.sync_time, method.sync_rate)
    return 1 - behind.compute_time / behind.overlapped_step_time


def largest_budget(training: Training, link: Link) -> float:
    """The budget that leaves `TOLERATED` of the step to a link, with a hidden flag.

    Returns:
        A share of the bytes of synchronous training: at most that of a sync on every
        step, and 0 if the flag alone takes longer.
    """
    share = _sync_share(training)
    tolerated = training.compute_time * TOLERATED / (1 - TOLERATED)
    rate = cost_model.break_even(
        budgeted(training, link, share)["hidden"],
        Method(training.compute_time, tolerated),
    )
    return share * min(max(rate, 0.0), 1.0)


def rows() -> Iterator[tuple[str, ...]]:
    """The cells of the table, a row for a model and a link."""
    for training in TRAININGS:
        for name, link in LINKS.items():
            budget = largest_budget(training, link)
            yield (
                training.name,
                f"{training.compute_time:.2f} s",
                name,
                _percent(synchronous(training, link).communication_share),
                *(_flags(budgeted(training, link, share)) for share in BUDGETS),
                f"{hiding_steps(training, link):,}",
                " / ".join(_percent(hidden(training, link, x)) for x in BUDGETS[1:]),
                f"{100 * budget:.2g}%" if budget else "none",
                f"{math.ceil(_sync_share(training) / budget):,}" if budget else "-",
            )


def _flags(methods: Mapping[str, Method]) -> str:
    shares = [_percent(method.communication_share) for method in methods.values()]
    return shares[0] if len(set(shares)) == 1 else " / ".join(shares)


def _percent(share: float) -> str:
    if share >= 0.995:
        return ">99%"
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def table() -> list[str]:
    """The lines of a Markdown table."""
    budgets = (f"{100 * budget:g}% of the bytes" for budget in BUDGETS)
    head = (
        *("model", "computation", "link", "synchronous", *budgets),
        *("steps that hide a sync", "hidden, 1% / 0.1%"),
        *(f"budget that waits {TOLERATED:.0%}", "steps between its syncs"),
    )
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows())]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


if __name__ == "__main__":
    print("\n".join(table()))
