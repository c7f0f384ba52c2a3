"""The example as one of several sites."""

import json
import subprocess
import sys

import launch
import main
import pytest

MICRO = (
    "--layers 2 --width 16 --heads 2 --batch 2 --sequence-length 16 "
    "--evaluation-batches 1 --evaluate-every 2 --checkpoint-every 2 --sync-every 2"
).split()


def command(name, folder, text, *more):
    place = ["--site", name, "--run", str(folder / "run"), "--out", str(folder / "out")]
    return [*MICRO, "--data", str(text), "--steps", "6", *place, *more]


@pytest.mark.slow
def test_two_terminals_have_one_model(tmp_path, text):
    """The two commands of the page; a third site comes when they have left."""
    first = [sys.executable, main.__file__]
    running = [
        subprocess.Popen(
            [*first, *command(name, tmp_path, text, "--short")], env=launch.ENVIRONMENT
        )
        for name in ("paris", "rome")
    ]
    assert [process.wait(200) for process in running] == [0, 0]
    assert main.main(command("oslo", tmp_path, text, "--steps", "4")) == 0
    files = tmp_path.glob("out/*.json")
    found = {path.stem: json.loads(path.read_text()) for path in files}
    assert set(found) == {"paris", "rome", "oslo"}
    assert all(row["counted"] >= 1 for row in found.values())
    assert found["oslo"]["round"] > found["paris"]["round"]
    # The same command goes on from the site's own checkpoint.
    assert main.main(command("oslo", tmp_path, text)) == 0
    lines = (tmp_path / "out" / "oslo.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, lines) if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
