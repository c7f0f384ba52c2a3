"""Two processes with one replica each are one process with two."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import two_processes

SECONDS = 120  # a process that waits for a dead one would wait for ever
# Means of two float32 numbers, summed by another implementation.
RTOL = 1e-5


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_what_every_process_reads():
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, Path(two_processes.__file__), str(index), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    alone = two_processes.train()
    assert alone["state"]["syncs"] == 2
    for text in printed:
        found = json.loads(text.splitlines()[-1])
        assert found["model"] == pytest.approx(alone["model"], rel=RTOL)
        assert found["divergence"] == pytest.approx(alone["divergence"], abs=RTOL)
        for what in ("state", "observed"):
            # No trigger value here: every_k compares nothing.
            numbers = {k: v for k, v in found[what].items() if v == v}
            assert numbers == {k: v for k, v in alone[what].items() if v == v}
            assert numbers["replicas"] == 2
