"""A site that is killed, and the others, and the site again."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import audit
import pytest
import site_main

STEPS, KILLED = 24, 10


def started(folder: Path, name: str, *more: int) -> subprocess.Popen:
    command = [sys.executable, site_main.__file__, str(folder), name, str(STEPS)]
    return subprocess.Popen(
        command + [str(x) for x in more], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again(tmp_path):
    survivor, victim = started(tmp_path, "oslo"), started(tmp_path, "rome", KILLED)
    victim.communicate(timeout=200)
    assert victim.returncode == -signal.SIGKILL
    again = started(tmp_path, "rome")
    ends = [
        process.communicate(timeout=200)[0].split() for process in (survivor, again)
    ]
    assert survivor.returncode == again.returncode == 0
    assert audit.audit(tmp_path)[1] == []
    counted: Counter[str] = Counter()
    for file in (tmp_path / "commits").iterdir():
        for entry in json.loads(file.read_text())["contributors"]:
            counted[entry["name"]] += entry["tokens"]
    assert counted["oslo"] == STEPS  # nothing was lost of the one that was not killed
    assert STEPS <= counted["rome"] <= STEPS + KILLED
    if ends[0][0] == ends[1][0]:  # both left after the same round
        assert ends[0][1] == ends[1][1]
