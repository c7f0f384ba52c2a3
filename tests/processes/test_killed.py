"""One of four processes dies or stands still: the others end, and the run goes on."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from interrupted_main import commands, results

import curvadion_jax as cd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * launch.SECONDS)]
PROCESSES, VICTIM = 4, 1
# Seconds from the first process that ended to the last: JAX looks every few.
BOUND = 60


def ended(all_commands, folder: Path) -> list[tuple[int | None, str]]:
    """Exit status and output of each; of the victim None if it stands still."""
    files = [folder / f"{index}.txt" for index in range(len(all_commands))]
    with contextlib.ExitStack() as stack:
        workers = [
            subprocess.Popen(
                [sys.executable, *command],
                stdout=stack.enter_context(file.open("w")),
                stderr=subprocess.STDOUT,
            )
            for command, file in zip(all_commands, files, strict=True)
        ]
    try:
        others = [w for index, w in enumerate(workers) if index != VICTIM]
        others[0].wait(launch.SECONDS)
        until = time.monotonic() + BOUND
        for worker in others[1:]:
            worker.wait(max(0.0, until - time.monotonic()))
        codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [(code, file.read_text()) for code, file in zip(codes, files, strict=True)]


def test_the_others_end_and_the_run_goes_on(text, four, tmp_path):
    out, (undisturbed, _) = tmp_path / "out", four
    for signals, status, saved in (("5:SIGKILL", -9, 3), ("8:SIGSTOP", None, 6)):
        left = ended(commands(text, out, PROCESSES, signals), tmp_path)
        codes = [code for code, _ in left]
        assert codes.pop(VICTIM) == status
        assert all(code not in (0, None) for code in codes)
        # JAX's own words, in the output of process 0.
        assert f"stopped sending heartbeats):\n{VICTIM}\n" in left[0][1]
        assert cd.checkpoint.latest_step(out / "checkpoints/diloco") == saved
    done = launch.together(commands(text, out, PROCESSES))
    assert [status for status, _ in done] == [0] * PROCESSES, done
    assert results(out) == results(undisturbed)
