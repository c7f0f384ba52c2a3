"""A method in training, as the user meets it: the journal, the bar, and Ctrl-C."""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import processes
import report
from jax.experimental import multihost_utils
from tqdm import tqdm

import curvadion_jax as cd

# Losses of so many steps go in one message between processes.
_GROUP = 10


class Interrupted(Exception):
    """Somebody asked to stop; everything up to here is saved.

    Attributes:
        by_user: Whether that was Ctrl-C, in any process, and not SIGTERM.
    """

    def __init__(self, message: str, by_user: bool):
        super().__init__(message)
        self.by_user = by_user


class Stop:
    """Whether to stop, which all processes are told at the same step.

    Several processes agree through JAX's preemption service, which SIGTERM starts in
    any of them, the way schedulers announce the end of a job. It sends nothing until
    then; a step looks at a local number.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._by_user = False
        self._steps = 0

    def ask(self, *, by_user: bool) -> None:
        """Stop soon: after this step, or with several processes a second later."""
        self._by_user |= by_user
        if jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)
        else:
            self._asked.set()

    def interrupted(self, message: str) -> Interrupted:
        """What to raise once all is saved. Every process calls it."""
        return Interrupted(message, processes.in_any(self._by_user))

    def after_step(self) -> bool:
        """Whether this step is the last. Every process asks once a step."""
        self._steps += 1  # of all methods: the service must never see it fall
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(self._steps)
        return self._asked.is_set()


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask for a stop; a second Ctrl-C stops at once.

    A KeyboardInterrupt may strike while the old state is donated and the new one not
    yet there. A flag that is looked at between two steps cannot. A second SIGTERM
    changes nothing: schedulers send several.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread may handle signals.
        return

    def handle(number, frame):
        del frame
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.ask(by_user=number == signal.SIGINT)

    numbers = [signal.SIGINT]
    if not jax.distributed.is_initialized():  # else it is the preemption service's
        numbers.append(signal.SIGTERM)
    previous = [(number, signal.signal(number, handle)) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


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
        report.write_text(file, "".join(kept))
        self._file, self._stream = file, file.open("a")

    def write(self, line: dict[str, Any]) -> None:
        clean = {
            key: report.finite(value) if isinstance(value, float) else value
            for key, value in line.items()
        }
        with report.naming(self._file):
            self._stream.write(json.dumps(clean, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        # What could not be written is tried once more, and has been reported.
        with contextlib.suppress(OSError):
            self._stream.close()


def read_journal(file: Path) -> list[dict[str, Any]]:
    """The lines of a journal; one that a kill cut off in the middle is left out.

    Raises:
        ValueError: it is damaged.
    """
    try:
        text = file.read_text()
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise report.unreadable(file, error) from error


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Say that a method is compiled, and how long that took."""
    start = time.perf_counter()
    _say(f"{name}: compiles")
    yield
    _say(f"{name}: compiled in {time.perf_counter() - start:.0f} s")


def _say(text: str) -> None:
    if processes.is_first():
        print(text, file=sys.stderr, flush=True)


class Progress:
    """The bar and the journal, one step late.

    A step's metrics are read once the next step has been dispatched, so that the
    device has work while the host waits for them. With several processes they are read
    in groups, one message each for the losses, and the first process writes. Where
    stderr is no terminal each evaluation is a line of its own in place of the bar.

    Args:
        name: The method.
        steps: Its steps in all.
        out: Directory of the journal.
        start: Steps that an earlier run has taken.
        seconds: What they took.
    """

    def __init__(self, name: str, steps: int, out: Path, start: int, seconds: float):
        first = processes.is_first()
        self._name, self._steps = name, steps
        self._journal = Journal(out / f"{name}.jsonl", start) if first else None
        self._bar = tqdm(
            total=steps,
            initial=start,
            desc=name,
            dynamic_ncols=True,
            disable=None if first else True,  # None: unless stderr is a terminal
        )
        self._began = time.perf_counter() - seconds
        self._pending: list[tuple[int, Any, float | None]] = []
        self._group = _GROUP if jax.process_count() > 1 else 1

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._journal:
            self._journal.close()

    def seconds(self) -> float:
        """Seconds of this method without compiling, earlier, stopped runs included."""
        return time.perf_counter() - self._began

    def add(self, step: int, metrics: Any, validation_loss: float | None) -> None:
        """Report the steps before this one, and keep this one for later."""
        if self._pending:
            # Not more than a step ahead of the device, so that a signal is seen soon.
            jax.block_until_ready(self._pending[-1][1])
        if len(self._pending) == self._group:
            self.flush()
        self._pending.append((step, metrics, validation_loss))

    def flush(self) -> None:
        """Report what is kept. A checkpoint comes after the lines of its steps."""
        kept, self._pending = self._pending, []
        losses = processes.mean_over_replicas([row[1]["loss"] for row in kept])
        if self._journal is None:
            return
        for (step, metrics, validation_loss), loss in zip(kept, losses, strict=True):
            sync = cd.metrics.read(metrics["sync"])
            line = {"step": step, "loss": loss, "seconds": round(self.seconds(), 2)}
            line |= {key: sync[key] for key in ("share", "bytes", "syncs")}
            line["synced"] = sync["since"] == 0
            # What does not apply to a method is not read.
            line |= {key: sync.get(key) for key in ("value", "threshold", "layer")}
            if validation_loss is not None:
                line["validation_loss"] = validation_loss
            self._journal.write(line)
            self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        shown = {
            "loss": f"{line['loss']:.3f}",
            "share": f"{line['share']:.2%}",
            "sent": report.human_bytes(line["bytes"]),
            "syncs": line["syncs"],
        }
        if self._bar.disable and "validation_loss" in line:
            shown["held-out loss"] = f"{line['validation_loss']:.3f}"
            words = ", ".join(f"{key} {value}" for key, value in shown.items())
            _say(f"{self._name}: step {line['step']} of {self._steps}, {words}")
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
