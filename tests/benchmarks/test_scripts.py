"""What the scripts that measure share, and the table of memory by hand."""

import subprocess
import sys
from pathlib import Path

import memory
import peers_table
import pytest

ROOT = Path(__file__).parents[2]
# Counters of a few words are less than this many bytes a parameter.
ATOL = 1e-6
MATRICES = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
PARAMETERS = 2 * 50304 * 768 + MATRICES + 12 * 2 * 768 + 768
TINY = {
    "compile_time.py": ["--layers", "1", "--methods", "adamw"],
    "memory.py": [],
    "products.py": ["--layers", "1"],
    "way.py": [],
    "optimizer_speed.py": ["--model", "tiny", "--layers", "1", "--ranks", "0.25"],
}


@pytest.mark.slow  # processes that start JAX
@pytest.mark.parametrize("script", TINY)
def test_a_script_prints_its_table(script):
    command = [sys.executable, ROOT / "benchmarks" / "step" / script, *TINY[script]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "|---|---|" in done.stdout


def test_the_documentation_has_the_table_of_memory():
    lines = (ROOT / "docs" / "memory-and-speed.md").read_text().splitlines()
    for name, step, sync in memory.rows():
        assert f"| {name} | {step:.2f} | {sync:.2f} | {step + sync:.2f} |" in lines


def test_bytes_of_state_by_hand():
    rows = {name: (step, sync) for name, step, sync in memory.rows()}
    # Q of a square kernel is [768, 192], and of the two others [768, 192] as well.
    q = 4 * 12 * 6 * 768 * 192 / PARAMETERS
    # The relative momentum change remembers a norm of every matrix.
    norms = 4 * 12 * 6 / PARAMETERS
    others = (PARAMETERS - MATRICES) / PARAMETERS
    muon = 4 * (1 - others) + 8 * others
    assert rows["`optax.adamw`"] == pytest.approx((8, 0), abs=ATOL)
    assert rows["`dion`, rank 1/4"] == pytest.approx((muon + q, 0), abs=ATOL)
    # Anchor, and in bfloat16 error feedback and outer momentum.
    assert rows["`local_muon`"] == pytest.approx((muon, 8), abs=ATOL)
    full = (muon + 4 * q + norms, 8)
    assert rows["`curvadion`"] == pytest.approx(full, abs=ATOL)
    assert rows["`local_muon`, plain average"] == pytest.approx((muon, 4), abs=ATOL)


def test_the_page_of_peers_has_the_table_of_their_results():
    lines = peers_table.RESULTS.read_text().splitlines()
    rows = [peers_table.json.loads(line) for line in lines]
    page = peers_table.RESULTS.with_name("README.md").read_text("utf-8")
    assert peers_table.table(rows) in page
