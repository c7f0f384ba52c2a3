"""A link between two network namespaces, made and removed around a `with`."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forwarder
from counters import Counters
from line import Conditions


class Link:
    """A running link.

    Attributes:
        namespaces: Paths by which a process enters each end, see `namespaces.enter`.
        counters_file: File of the counters.
        counters: What was delivered to each end.
    """

    def __init__(self, process: subprocess.Popen, paths: list[str], file: Path):
        self._process = process
        self.namespaces = [Path(path) for path in paths]
        self.counters_file, self.counters = file, Counters(file)

    def cut(self) -> None:
        """Let no packet pass any more."""
        self._command("cut")

    def join(self) -> None:
        """Let packets pass again."""
        self._command("join")

    def _command(self, word: str) -> None:
        stream = self._process.stdin
        if stream is None:
            raise ValueError("the forwarder was started without an input")
        stream.write(word + "\n")
        stream.flush()


@contextlib.contextmanager
def open_link(conditions: Conditions, seed: int = 0) -> Iterator[Link]:
    """Make two namespaces joined by a link; both are gone afterwards.

    Args:
        conditions: What the link is like.
        seed: Of the losses.
    """
    with tempfile.TemporaryDirectory(prefix="wan-") as folder:
        file = Path(folder) / "counters"
        counters = Counters(file)
        del counters
        process = subprocess.Popen(
            forwarder.command(conditions, file, seed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the process that cleans up.
            start_new_session=True,
        )
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(
                    f"the forwarder ended with status {process.wait()}; it says why"
                )
            yield Link(process, json.loads(line), file)
        finally:
            process.kill()
            process.communicate()
