"""What a run is: one dataclass, and its sizes by name.

Nothing here touches JAX, so that `main.py` can read the flags before JAX starts.
"""

import dataclasses
from typing import Any


class UserError(ValueError):
    """Something the user asked for cannot be done; the message says what and why."""


def _of(text: str, **default: Any) -> Any:
    """A field, with what `main.py --help` says of it."""
    return dataclasses.field(metadata={"help": text}, **default)


@dataclasses.dataclass(frozen=True)
class Config:
    """One comparison: a model, its data, and how long every method trains.

    None, where it is a default, is each method's own value.
    """

    layers: int = _of("blocks")
    width: int = _of("width of the residual stream")
    heads: int = _of("attention heads; they divide the width into even parts")
    batch: int = _of("sequences per replica and step")
    sequence_length: int = _of("tokens in a sequence")
    steps: int = _of("steps of each method")
    evaluate_every: int = _of("steps between evaluations")
    evaluation_batches: int = _of("held-out batches in an evaluation")
    checkpoint_every: int = _of("steps between checkpoints")
    dtype: str = _of("type of the matrix products", default="float32")
    replicas: int = _of("copies of the model, one on each device", default=8)
    learning_rate: float | None = _of(
        "peak learning rate of the matrices", default=None
    )
    rank: int | float = _of(
        "rank of Dion's factors: 16 is a rank, 0.25 a share of the smaller side",
        default=0.25,
    )
    budget: float = _of(
        "share of synchronous training's bytes: local_muon, curvadion_budget",
        default=0.01,  # of both, to compare them
    )
    threshold: float = _of(
        "relative momentum change above which curvadion, paper and authors_code sync",
        default=0.45,  # with tiny's batch curvadion sends about 1% of the bytes
    )
    sync_every: int = _of("steps between syncs of the periodic methods", default=30)
    seed: int = _of("seed of parameters and data order", default=0)
    data: str | None = _of(
        "text (file or directory) or directory of .bin token shards; the standard"
        " library's source without it",
        default=None,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                smallest = 0 if field.name == "seed" else 1
                if value < smallest:
                    raise UserError(
                        f"{flag(field.name)} must be at least {smallest}, got {value}"
                    )
        if self.width % (2 * self.heads):
            raise UserError(
                f"--width {self.width} is not a multiple of 2 x --heads {self.heads}: "
                "every head needs an even width for its rotary pairs"
            )
        for name in ("learning_rate", "budget", "threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(
                    f"{flag(name)} must be positive and finite, got {value}"
                )
        if not (self.rank >= 1 if isinstance(self.rank, int) else 0 < self.rank <= 1.0):
            raise UserError(
                "--rank must be a whole number from 1 (a rank) or a number with a "
                f"point in (0, 1] (a fraction of the smaller side), got {self.rank}"
            )


def flag(field: str) -> str:
    """The command line's name of a field.

    Examples:
        >>> flag("sequence_length")
        '--sequence-length'
    """
    return "--" + field.replace("_", "-")


# `tiny` was chosen by training several sizes for the same four minutes of CPU time
# (Xeon with AVX-512) on 8 CPU devices, with optax.contrib.muon and averaged gradients.
# Held-out nats a byte: 1.46 for 3 layers of width 96 and for 4 of width 64, 1.63 for 2
# of width 128, 1.66 for 4 of width 128; sequences of 256 tokens were slower, 1.56.
# A step is 8192 tokens, 1024 of them a replica's, and takes 0.8 to 0.9 seconds of CPU
# time: about 19 000 tokens/s on 2 cores. `medium` is the same model with four times the
# batch: less gradient noise, on which local steps and triggers depend. At this width a
# rank of a quarter, 24, is a handicap that it is not at real ones. `small` and
# `160m` are for accelerators, and have not been timed.
_TINY = Config(
    layers=3,
    width=96,
    heads=2,
    batch=8,
    sequence_length=128,
    steps=300,
    evaluate_every=50,
    evaluation_batches=4,
    checkpoint_every=50,
    rank=1.0,
)
# What `--short` changes.
SHORT = {"batch": 2, "steps": 400, "evaluate_every": 50, "checkpoint_every": 200}
PRESETS = {
    "tiny": _TINY,
    "medium": dataclasses.replace(_TINY, batch=32, checkpoint_every=25),
    "small": Config(
        layers=8,
        width=384,
        heads=6,
        batch=32,
        sequence_length=512,
        steps=2_000,
        evaluate_every=200,
        evaluation_batches=8,
        checkpoint_every=200,
        dtype="bfloat16",
    ),
    "160m": Config(
        layers=12,
        width=768,
        heads=6,
        batch=32,
        sequence_length=1024,
        steps=3_000,
        evaluate_every=250,
        evaluation_batches=16,
        checkpoint_every=250,
        dtype="bfloat16",
    ),
}
