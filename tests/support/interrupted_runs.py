"""Starts of `interrupted_main.py` in several processes, and what they leave."""

import json
from pathlib import Path

import interrupted_main
import journal
import launch


def commands(
    text: Path, out: Path, number: int, signals: str = "never"
) -> list[list[str]]:
    """A command for each process."""
    place = ["--coordinator", f"localhost:{launch.free_port()}"]
    place += ["--num-processes", str(number)]
    files = ["--data", str(text), "--out", str(out)]
    same = [interrupted_main.__file__, signals, *interrupted_main.MICRO]
    same += [*files, *place]
    return [[*same, "--process-id", str(index)] for index in range(number)]


def results(out: Path) -> tuple[list, list]:
    """Summary and journal without the seconds."""
    summary = json.loads((out / "summary.json").read_text())
    lines = journal.read_journal(out / "diloco.jsonl")
    for row in (*summary, *lines):
        row.pop("seconds")
    return summary, lines
