"""Several processes of one program on this machine, which cannot hang a test."""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SECONDS = 240  # a process that waits for a dead one would wait for ever
# Compiling takes longer than running here, and what starts again has compiled before.
_CACHE = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
ENVIRONMENT = os.environ | {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_COMPILATION_CACHE_DIR": _CACHE,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def together(commands: Sequence[Sequence[str | Path]]) -> list[tuple[int, str]]:
    """Exit status and output of Python programs that run at the same time."""
    workers = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=ENVIRONMENT,
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
