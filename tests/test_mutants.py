"""Every fault of `mutants.py` can still be put into the code."""

import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MUTANTS = runpy.run_path(str(HERE / "mutants.py"))["MUTANTS"]


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_fault_replaces_occurs_once_and_its_tests_exist(name):
    mutant = MUTANTS[name]
    text = (HERE.parent / "curvadion_jax" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    for tests in mutant.tests.split():
        assert (HERE / tests).exists()
