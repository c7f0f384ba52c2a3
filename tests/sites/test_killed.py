"""A site that is killed, and the others, and the site again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import site_main

STEPS = 24


def started(folder: Path, name: str) -> subprocess.Popen:
    command = [sys.executable, site_main.__file__, str(folder), name, str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again(tmp_path):
    survivor, victim = started(tmp_path, "oslo"), started(tmp_path, "rome")
    while line(victim) != "9\n":
        assert victim.poll() is None
    victim.kill()
    victim.communicate()
    again = started(tmp_path, "rome")
    ends = [process.communicate()[0].split()[-2:] for process in (survivor, again)]
    assert survivor.returncode == again.returncode == 0
    files = sorted((tmp_path / "commits").iterdir())
    commits = [json.loads(file.read_text()) for file in files]
    assert [commit["round"] for commit in commits] == list(range(len(commits)))
    entries = [entry for commit in commits for entry in commit["contributors"]]
    uids = [entry["uid"] for entry in entries]
    assert len(set(uids)) == len(uids)
    counted = {
        name: sum(e["tokens"] for e in entries if e["name"] == name)
        for name in ("oslo", "rome")
    }
    assert counted["oslo"] == STEPS  # nothing was lost of the one that was not killed
    assert STEPS <= counted["rome"] <= STEPS + 10
    if ends[0][0] == ends[1][0]:  # both left after the same round
        assert ends[0][1] == ends[1][1]
