"""The table of memory in docs/results.md is what states weigh, some rows by hand."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Counters of a few words are less than this many bytes a parameter.
ATOL = 1e-6
MATRICES = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
PARAMETERS = 2 * 50304 * 768 + MATRICES + 12 * 2 * 768 + 768


@pytest.fixture(scope="module")
def memory():
    return runpy.run_path(str(ROOT / "benchmarks" / "memory.py"))


def test_the_documentation_has_this_table(memory):
    lines = (ROOT / "docs" / "results.md").read_text().splitlines()
    start = lines.index(memory["table"]()[0])
    end = lines.index("", start)
    assert lines[start:end] == memory["table"]()


def test_rows_by_hand(memory):
    rows = {name: (step, sync) for name, step, sync in memory["rows"]()}
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
    quarter = "`curvadion`, rank 1/4"
    assert rows[quarter] == pytest.approx((muon + q + norms, 8), abs=ATOL)
    full = (muon + 4 * q + norms, 8)
    assert rows["`curvadion`"] == pytest.approx(full, abs=ATOL)
    assert rows["`local_muon`, plain average"] == pytest.approx((muon, 4), abs=ATOL)
