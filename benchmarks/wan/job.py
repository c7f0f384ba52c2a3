"""What one training process is told to do, and what all of them share."""

import dataclasses
from typing import Any

REPLICAS = 2
# Of the learning rate's schedule, and of the runs that are evaluated.
STEPS = 300
# Steps between evaluations.
EVALUATE_EVERY = 10
# Not a method: single all-reduces of some sizes.
MESSAGES = "messages"


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a job.

    Attributes:
        method: `MESSAGES`, or see `training.build`.
        steps: Steps to take, of a schedule of `STEPS`.
        learning_rate: Peak of the schedule.
    """

    method: str
    steps: int
    learning_rate: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        parts: To be done in this order.
        out: File that gets a line of JSON a step.
        process: Number of this process.
        processes: Number of all, each with as many replicas.
        replicas: All of them. With one nothing is sent.
        namespace: Path of this end's namespace, or none.
        counters: File of the link's counters, or none.
        coordinator: Host and port of process 0, or none with one process.
        heartbeat: Seconds of silence after which JAX ends the others.
        evaluate: Whether to evaluate the model, and read the program.
        core: Core to stay on, or none.
    """

    parts: tuple[Part, ...]
    out: str = ""
    process: int = 0
    processes: int = 1
    replicas: int = REPLICAS
    namespace: str | None = None
    counters: str | None = None
    coordinator: str | None = None
    heartbeat: int = 100
    evaluate: bool = False
    core: int | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Job":
        """The inverse of `dataclasses.asdict`, after JSON."""
        others = {key: value for key, value in fields.items() if key != "parts"}
        return cls(tuple(Part(**part) for part in fields["parts"]), **others)
