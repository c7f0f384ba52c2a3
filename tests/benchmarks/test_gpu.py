"""The kit for an accelerator runs, goes on where it was, and notes what fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


def lines(results, *options):
    command = [sys.executable, RUN, "--models", "tiny", "--seconds", "0.01"]
    command += ["--results", results, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_measures_each_once(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text('{"model": "tiny", "method": "Muon", "error": "no memory"}\n')
    shown = lines(file, "--only", "*uon*")  # Muon, which is there, and `local_muon`
    found = map(json.loads, file.read_text().splitlines())
    rows = {row["method"]: row for row in found}
    assert list(rows) == ["Muon", "`local_muon`", "`local_muon`, one program"]
    measured = rows["`local_muon`"]
    keys = {"first_step", "step", "first_sync", "sync_adds", "limit"}
    assert measured.keys() >= keys
    # Local steps have no codes, and the sync that is measured has.
    assert (measured["encodes"], measured["sync_encodes"]) == (False, True)
    assert "| tiny | Muon | no memory |" in "\n".join(shown)
    before = file.read_text()
    assert lines(file, "--only", "*uon*") == shown == lines(file, "--table")
    assert file.read_text() == before


@pytest.mark.slow
def test_trains_both_and_leaves_a_profile(text, tmp_path):
    command = [sys.executable, RUN.with_name("train.py"), "--size", "tiny"]
    command += ["--steps", "8", "--text", text, "--results", tmp_path, "--profile"]
    subprocess.run(command, check=True, timeout=300)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    muon, local = map(json.loads, lines)
    assert (muon["syncs"], local["syncs"]) == (8, 1)
    assert 0 == muon["divergence"] < local["divergence"]
    assert list(tmp_path.rglob("*.xplane.pb"))
