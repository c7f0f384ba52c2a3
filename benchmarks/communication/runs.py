"""What a run of the study is: numbers and short texts that fit on a line of JSON."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. Texts are a word and its numbers, separated by blanks.

    Attributes:
        inner: A replica's own optimizer: 'muon', 'adamw', 'dion RANK' with RANK a
            fraction of the smaller side; 'local_muon' or 'curvadion RANK', the
            library's own; or all of the published rules of 'paper RANK THRESHOLD' or
            'authors_code RANK THRESHOLD', which fix every other part.
        learning_rate: Peak of the schedule, for all parameters.
        momentum: Decay rate of the momentum of Dion and Muon.
        trigger: 'always', 'every K', 'evenly SHARE' (of the bytes of synchronous
            training, the last sync among them), 'budget SHARE' (the same share, spent
            where the relative momentum change is large), 'budget SHARE AHEAD BEHIND'
            (with these bounds), 'rmmc THRESHOLD'.
        sync: 'gradients', 'factors' or 'reconcile'.
        compressor: Form in which that is sent: 'exact', 'int BITS'.
        outer: Outer step of `reconcile`: 'mean', 'nesterov RATE MOMENTUM'.
        replicas: Number of replicas.
        seed: Of the parameters and the order of the data.
        steps: Steps; a sync ends with the last one wherever the trigger allows any.
        final: Learning rate at the end, as a share of its peak.
        last_momentum: Decay rate of the momentum at the end, reached in equal steps
            from `momentum`; None keeps that.
        state: dtype of the local momentum, the outer one and error feedback.
    """

    inner: str
    learning_rate: float
    momentum: float = 0.95
    trigger: str = "always"
    sync: str = "gradients"
    compressor: str = "exact"
    outer: str = "mean"
    replicas: int = 8
    seed: int = 0
    steps: int = 300
    final: float = 0.05
    last_momentum: float | None = None
    state: str = "float32"

    def key(self) -> str:
        """The run as canonical JSON; equal for equal runs.

        Examples:
            >>> Run("adamw", 0.01).key() == Run(inner="adamw", learning_rate=0.01).key()
            True
        """
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def but(self, **changes: Any) -> "Run":
        """The same run with some fields changed."""
        return dataclasses.replace(self, **changes)


def words(text: str) -> tuple[str, list[int | float]]:
    """A word and the numbers after it, floats where they have a point.

    Examples:
        >>> words("budget 0.01 1")
        ('budget', [0.01, 1])
    """
    word, *numbers = text.split()
    return word, [float(number) if "." in number else int(number) for number in numbers]
