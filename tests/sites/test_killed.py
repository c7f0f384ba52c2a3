"""A site that is killed, and the others, and the site again."""

import json
import signal
import subprocess
import sys
from pathlib import Path

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
    files = sorted((tmp_path / "commits").iterdir())
    commits = [json.loads(file.read_text()) for file in files]
    assert [int(file.stem) for file in files] == list(range(len(commits)))
    entries = [entry for commit in commits for entry in commit["contributors"]]
    uids = [entry["uid"] for entry in entries]
    assert len(set(uids)) == len(uids)
    counted = {
        name: sum(e["tokens"] for e in entries if e["name"] == name)
        for name in ("oslo", "rome")
    }
    assert counted["oslo"] == STEPS  # nothing was lost of the one that was not killed
    assert STEPS <= counted["rome"] <= STEPS + KILLED
    if ends[0][0] == ends[1][0]:  # both left after the same round
        assert ends[0][1] == ends[1][1]
