"""A method in training, as the user meets it: the journal, the bar, and Ctrl-C."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import report
from tqdm import tqdm

import curvadion_jax as cd


class Interrupted(Exception):
    """The user asked to stop; everything up to here is saved."""


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second Ctrl-C stops at once.

    A KeyboardInterrupt may strike while the old state is donated and the new one not
    yet there. A flag that is looked at between two steps cannot.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread may handle signals.
        return

    def handle(number, frame):
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


class Journal:
    """`METHOD.jsonl`, one JSON object a step, written as the steps come.

    Args:
        file: The file; what is in it stays, up to `step`.
        step: Where the run resumes. Later lines, which a killed run wrote after its
            last checkpoint, are dropped: their steps are taken again.
    """

    def __init__(self, file: Path, step: int):
        lines = read_journal(file) if file.exists() else []
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
        file.write_text("".join(kept))
        self._stream = file.open("a")

    def write(self, line: dict[str, Any]) -> None:
        clean = {
            key: report.finite(value) if isinstance(value, float) else value
            for key, value in line.items()
        }
        self._stream.write(json.dumps(clean, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_journal(file: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that a kill cut off in the middle is left out."""
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """The bar and the journal, one step late.

    A step's metrics are read once the next step has been dispatched, so that the
    device has work while the host waits for them.

    Args:
        name: The method.
        steps: Its steps in all.
        out: Directory of the journal.
        start: Steps that an earlier run has taken.
        seconds: What they took.
    """

    def __init__(self, name: str, steps: int, out: Path, start: int, seconds: float):
        self._journal = Journal(out / f"{name}.jsonl", start)
        self._bar = tqdm(total=steps, initial=start, desc=name, dynamic_ncols=True)
        self._began = time.perf_counter() - seconds
        self._pending: tuple[int, Any, float | None] | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        self._journal.close()

    def seconds(self) -> float:
        """Seconds spent on this method, those of earlier, stopped runs included."""
        return time.perf_counter() - self._began

    def add(self, step: int, metrics: Any, validation_loss: float | None) -> None:
        """Report the step before this one, and keep this one for later."""
        self.flush()
        self._pending = (step, metrics, validation_loss)

    def flush(self) -> None:
        """Report what is kept. A checkpoint comes after the lines of its steps."""
        if self._pending is None:
            return
        step, metrics, validation_loss = self._pending
        self._pending = None
        sync = cd.metrics.read(metrics["sync"])
        loss = float(np.mean(jax.device_get(metrics["loss"])))
        line = {"step": step, "loss": loss, "seconds": round(self.seconds(), 2)}
        for key in ("syncs", "synced", "value", "threshold", "layer", "bytes"):
            line[key] = sync[key]
        if validation_loss is not None:
            line["validation_loss"] = validation_loss
        self._journal.write(line)
        self._bar.set_postfix(
            loss=f"{loss:.3f}",
            sync=f"{100 * sync['sync_rate']:.1f}%",
            sent=report.human_bytes(sync["bytes"]),
            refresh=False,
        )
        self._bar.update()
