"""The code of README and guide runs as it stands, and CI runs the README's commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(language: str, *pages: str) -> list[str]:
    text = "".join((ROOT / page).read_text() for page in pages)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


@pytest.mark.slow
def test_python_blocks_run_in_order(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    pages = ("README.md", "docs/guide.md", "docs/sharding.md", "docs/own-loop.md")
    for block in blocks("python", *pages):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"^\d+ ([\d.]+)$", printed, flags=re.M)]
    quick_start, own_loop = losses[:5], losses[-3:]
    assert quick_start[-1] < quick_start[0] / 2
    assert own_loop[-1] < own_loop[0] / 2
    assert "'replicas': 8" in printed
    assert "'syncs'" in printed
    assert "optimizer" in printed


def test_the_test_command_is_the_one_that_ci_runs():
    command = next(x for x in blocks("bash", "README.md") if "pytest" in x)
    script = (ROOT / ".ci/run").read_text()
    for part in command.strip().split(" && "):
        wanted = part.replace("pip install", "pip install --quiet")
        assert part in script or wanted in script, part
