"""SIGKILL at random moments of saves: what is listed is complete, and the run goes on.

Five kills, and as many as you like with

    python -m pytest tests/checkpoint/test_killed_saves.py --kills 50 -rP
"""

import collections
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import saving_main

import curvadion_jax as cd

# Saves of which the last, measured from outside, says how long one takes.
MEASURED = 3
SECONDS = 120  # a child that says nothing for so long is stuck
TEMPORARY = ".orbax-checkpoint-tmp"


def said(child: subprocess.Popen, seconds: float) -> str | None:
    """The next line of the child, or None if it says nothing for so long."""
    if not select.select([child.stdout], [], [], seconds)[0]:
        return None
    return child.stdout.readline().decode().strip()


def kill_within_a_save(folder: Path, first: int, fraction: float) -> int:
    """Kills a child after this part of the time that a save takes; which save."""
    command = [sys.executable, saving_main.__file__, str(folder), str(first)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        step, seconds = first, 0.0
        while True:
            assert said(child, SECONDS) == f"saving {step}"
            began, measured = time.monotonic(), step >= first + MEASURED
            wait = fraction * seconds if measured else SECONDS
            line = said(child, wait)
            if line is None and measured:
                break
            assert line == f"saved {step}"
            step, seconds = step + 1, time.monotonic() - began
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert child.returncode == -9
    return step


def stage(folder: Path, step: int) -> str:
    """How far the save of a step had come, by what is left of it."""
    names = os.listdir(folder)
    if str(step) in names:
        steps = [name for name in names if name.isdigit()]
        removing = len(steps) > saving_main.KEEP or len(names) > len(steps)
        return "removing old ones" if removing else "done"
    if f"{step}{TEMPORARY}" not in names:
        return "not begun"
    inside = os.listdir(folder / f"{step}{TEMPORARY}")
    return "writing" if f"state{TEMPORARY}" in inside else "finalising"


def check_all(folder: Path) -> list[int]:
    """Restores every step that is listed; all of them hold what was saved."""
    names = [path.name for path in folder.iterdir()]
    steps = sorted(int(name) for name in names if name.isdigit())
    assert cd.checkpoint.latest_step(folder) == steps[-1]
    for step in steps:
        expected = saving_main.contents(step)
        found = cd.checkpoint.restore(folder, expected, step)
        assert found.keys() == expected.keys()
        for name, array in jax.device_get(found).items():
            assert array.tobytes() == np.asarray(expected[name]).tobytes(), name
        assert cd.checkpoint.read_extra(folder, step) == {"step": step}
    return steps


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_killed_save_leaves_complete_checkpoints(tmp_path, pytestconfig):
    kills, folder = pytestconfig.getoption("--kills"), tmp_path / "run"
    seeded, stages, step = random.Random(0), collections.Counter(), 0
    for index in range(kills):
        # One in every n-th part of a save, so that a few of them see all of it.
        fraction = (index + seeded.random()) / kills
        killed = kill_within_a_save(folder, step, fraction)
        where = stage(folder, killed)
        stages[where] += 1
        steps = check_all(folder)
        complete = where in ("removing old ones", "done")
        assert steps[-1] == (killed if complete else killed - 1)
        step = steps[-1] + 1
        options = {"keep": saving_main.KEEP, "extra": {"step": step}}
        cd.checkpoint.save(folder, step, saving_main.contents(step), **options)
        left = {path.name for path in folder.iterdir()}
        assert left == {str(step - 1), str(step)}
        print(f"{fraction:.3f} of the save of step {killed}: {where}")
        step += 1
    print(f"{kills} kills:", dict(stages))
    assert stages["writing"] + stages["finalising"] > 0
