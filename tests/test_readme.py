"""The README's code runs as it stands, and its commands are the ones CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


@pytest.mark.slow
def test_python_blocks_run_in_order(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "'replicas': 8" in printed
    assert "'syncs'" in printed
    assert "optimizer" in printed


def test_the_test_command_is_the_one_that_ci_runs():
    command = next(block for block in blocks("bash") if "pytest" in block)
    script = (ROOT / ".ci/run").read_text()
    for part in command.strip().split(" && "):
        wanted = part.replace("pip install", "pip install --quiet")
        assert part in script or wanted in script, part
