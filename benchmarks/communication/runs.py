"""What a run of the study is: numbers and short texts that fit on a line of JSON."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run. Texts are a word and its numbers, separated by blanks.

    Attributes:
        inner: A replica's own optimizer: 'dion RANK', with RANK a fraction of the
            smaller side, 'muon', 'adamw' or 'sgd'; 'curvadion' or 'curvadion RANK', the
            library's own; or all of the published rules of 'paper RANK THRESHOLD' or
            'authors_code RANK THRESHOLD', which fix every other part.
        learning_rate: Peak of the inner optimizer's schedule, for all parameters.
        momentum: Decay rate of the momentum of Dion and Muon.
        trigger: 'always', 'every K', 'evenly SHARE' (of the bytes of synchronous
            training, the last sync among them), 'budget SHARE' (the same share, spent
            where the relative momentum change is large), 'budget SHARE AHEAD BEHIND'
            (with these bounds), 'turn SHARE AHEAD BEHIND' and 'moved SHARE AHEAD
            BEHIND' (the same, where Muon's momentum has turned since the last sync, and
            where the relative drift is large), 'drift THRESHOLD', 'rmmc THRESHOLD',
            'quadratic ALPHA' (syncs as frequent as the learning rate is high),
            'weighted SHARE POWER' (the same share, spent as the learning rate to this
            power), 'warm SHARE STEPS' (the same share, after syncs on each of the first
            steps).
        sync: 'gradients', 'factors' or 'reconcile'.
        compressor: Form in which that is sent: 'exact', 'int 8',
            'int 2 4' (the mean in 4 bits), 'int 2 2 1024' (in blocks of 1024),
            'low_rank FRACTION',
            'low_rank FRACTION 4' (factors in 4 bits), 'top_k FRACTION 2' (values in 2
            bits).
        outer: Outer step of `reconcile`: 'mean', 'nesterov RATE MOMENTUM',
            'orthonormal RATE MOMENTUM', 'nesterov RATE MOMENTUM RATE MOMENTUM' (from
            the first sync's to the last's, in equal steps).
        sent_momentum: Form in which `reconcile` averages momenta; 'none' leaves them
            local.
        replicas: Number of replicas.
        seed: Of the parameters and the order of the data.
        steps: Steps; a sync ends with the last one wherever the trigger allows any.
        dropped: Share of the participations in syncs that are left out at random.
        final: Learning rate at the end, as a share of its peak.
        last_momentum: Decay rate of the momentum at the end, reached in equal steps
            from `momentum`; None keeps that.
        other_rate: Learning rate of embeddings, head and norms over that of matrices.
        state: dtype of the local momentum, the outer one and error feedback.
        delay: Steps from the one on which a sync begins to the one on which it ends.
        fragments: Parts of the parameters that come together in turn, one at a sync.
        averaged: 'matrices' or 'others', to see what their local steps lose: their
            gradients are averaged on every step, exactly, and no bytes counted.
        weight_average: Age of the weights in an exponential average over the steps, as
            a share of the run; the last loss is that of it. 0.0 averages nothing.
    """

    inner: str
    learning_rate: float
    momentum: float = 0.95
    trigger: str = "always"
    sync: str = "gradients"
    compressor: str = "exact"
    outer: str = "mean"
    sent_momentum: str = "none"
    replicas: int = 8
    seed: int = 0
    steps: int = 300
    dropped: float = 0.0
    final: float = 0.05
    last_momentum: float | None = None
    other_rate: float = 1.0
    state: str = "float32"
    delay: int = 0
    fragments: int = 1
    averaged: str = "none"
    weight_average: float = 0.0

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
    """A word and the numbers behind it, floats where they have a point.

    Raises:
        ValueError: what follows the word are not numbers.

    Examples:
        >>> words("low_rank 0.25 4")
        ('low_rank', [0.25, 4])
    """
    word, *numbers = text.split()
    return word, [float(number) if "." in number else int(number) for number in numbers]
