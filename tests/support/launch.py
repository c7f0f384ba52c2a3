"""Several processes of one program on this machine, which cannot hang a test."""

import os
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


def caching(folder: Path) -> dict[str, str]:
    """An environment in which JAX keeps there whatever it compiles."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def together(
    commands: Sequence[Sequence[str | Path]], environment: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """Exit status and output of Python programs that run at the same time."""
    workers = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
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
