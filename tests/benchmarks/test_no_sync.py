"""The check of PyTorch that docs/rmmc.md has, where PyTorch is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "no_sync.py"


@pytest.mark.slow  # processes that start PyTorch
def test_pytorch_averages_gradients_unless_the_forward_pass_is_inside_no_sync():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["outside 1.5 1.5", "inside  1.0 2.0", ""]
