"""The example as one of several sites."""

import json
import subprocess
import sys

import main
import pytest

from curvadion_jax.sites import _rounds

MICRO = (
    "--layers 2 --width 16 --heads 2 --batch 2 --sequence-length 16 "
    "--evaluation-batches 1 --evaluate-every 2 --checkpoint-every 2"
).split()


def command(name, folder, text, *more, steps=6):
    place = ["--site", name, "--run", str(folder / "run"), "--out", str(folder / "out")]
    sizes = [*MICRO, "--data", str(text), "--steps", str(steps), "--sync-every", "2"]
    return [*sizes, *place, *more]


def journal(folder, name):
    lines = (folder / "out" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_terminals_have_one_model(tmp_path, text):
    """The two commands of the page; a third site comes when they have left."""
    first = [sys.executable, main.__file__]
    running = [
        subprocess.Popen([*first, *command(name, tmp_path, text, "--short")])
        for name in ("paris", "rome")
    ]
    assert [process.wait(200) for process in running] == [0, 0]
    assert main.main(command("oslo", tmp_path, text)) == 0
    files = tmp_path.glob("out/*.json")
    found = {path.stem: json.loads(path.read_text()) for path in files}
    assert set(found) == {"paris", "rome", "oslo"}
    assert all(row["counted"] >= 1 for row in found.values())
    assert found["oslo"]["round"] > found["paris"]["round"]


@pytest.mark.slow
def test_a_site_goes_on_from_its_own_checkpoint(tmp_path, text):
    assert main.main(command("oslo", tmp_path, text, steps=4)) == 0
    assert (tmp_path / "run" / _rounds.member_key("oslo", 1, "left")).exists()
    assert main.main(command("oslo", tmp_path, text, steps=6)) == 0
    steps = [row["step"] for row in journal(tmp_path, "oslo") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_name_without_a_run(tmp_path, text, capsys):
    with pytest.raises(SystemExit):
        main.main(["--site", "oslo", "--out", str(tmp_path)])
    assert "--site NAME and --run URL belong together" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["--site", "oslo", "--run", str(tmp_path), "--restart", "--rank=4"])
    assert "a site does not read --restart, --rank" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_run_refuses_is_told_as_a_wrong_flag(tmp_path, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(command("my site", tmp_path, text))
    assert ended.value.code == 2
    assert "got 'my site'" in capsys.readouterr().err
    assert main.main(command("oslo", tmp_path, text, steps=1)) == 0
    with pytest.raises(SystemExit) as ended:
        main.main(command("rome", tmp_path, text, "--width", "32"))
    assert ended.value.code == 2
    assert "Give the same model" in capsys.readouterr().err
