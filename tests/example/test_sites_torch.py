"""PyTorch and JAX at sites of one run, of which one is killed and started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "sites_torch" / "together.py"


@pytest.mark.slow
def test_all_contributions_are_measured_from_the_same_bits_and_none_is_lost(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    given = ["--out", str(tmp_path / "out"), "--kills", "1", "--steps", "140"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *given, "--pace", "0.5", "--pause", "0.1"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills delayed the others" in done.stdout
    assert done.stdout.count("nats per byte") == 3
    assert " rounds, 0 faults" in done.stdout
