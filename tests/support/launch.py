"""Several processes of one program on this machine, which cannot hang a test."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS = 240  # a process that waits for a dead one would wait for ever


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def together(
    commands: Sequence[Sequence[str | Path]],
) -> list[tuple[int, str]]:
    """Exit status and output of Python programs that run at the same time."""
    workers = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        printed = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [(w.returncode, text) for w, text in zip(workers, printed, strict=True)]
