"""Training in pieces: what was stopped goes on from where it was, bit for bit."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import curvadion_jax as cd


@dataclasses.dataclass
class Progress:
    """How far a run has got.

    Attributes:
        step: Steps that were taken.
        curve: Loss after some of them.
        seconds: Processor time that they took.
    """

    step: int = 0
    curve: dict[int, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a run, which ends at a time.

    Attributes:
        folder: Where the run is kept between pieces.
        end: When the piece ends, in seconds of `time.time`.
    """

    folder: Path
    end: float

    def begin(self, training: Any) -> tuple[Any, Progress]:
        """What was kept at the end of the last piece, or what is given."""
        if cd.checkpoint.latest_step(self.folder) is None:
            return training, Progress()
        kept = Progress(**cd.checkpoint.read_extra(self.folder))
        kept.curve = {int(step): loss for step, loss in kept.curve.items()}
        return cd.checkpoint.restore(self.folder, training), kept

    def is_over(self) -> bool:
        """Whether it is time to keep the run and to stop."""
        return time.time() >= self.end

    def keep(self, training: Any, progress: Progress) -> None:
        """Writes the run to disk, in place of what was there of an earlier step."""
        if cd.checkpoint.latest_step(self.folder) == progress.step:
            return
        extra = dataclasses.asdict(progress)
        cd.checkpoint.save(self.folder, progress.step, training, keep=1, extra=extra)

    def clear(self) -> None:
        """Removes what was kept of a run that has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
