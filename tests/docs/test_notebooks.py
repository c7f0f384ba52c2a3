"""The notebooks run from top to bottom, those of results at a small size."""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

import make_tutorial  # noqa: E402

RESULTS = sorted(set(NOTEBOOKS.glob("*.ipynb")) - {make_tutorial.NOTEBOOK})
# Jupyter's client warns of its own defaults; what the notebooks do runs elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def execute(notebook, monkeypatch) -> str:
    """What its cells print."""
    # Compiling takes longer than running here.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    place = {"metadata": {"path": str(NOTEBOOKS)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", ())]
    return "".join(x.text for x in outputs if x.get("name") == "stdout")


@pytest.mark.slow
@pytest.mark.timeout(900)  # several programs, of which each compiles
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_runs_at_a_small_size(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CURVADION_NOTEBOOK_STEPS", "12")
    monkeypatch.setenv("CURVADION_NOTEBOOK_RESULTS", str(tmp_path))
    execute(nbformat.read(path, as_version=4), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_trains(monkeypatch):
    printed = execute(make_tutorial.notebook(), monkeypatch)
    found = re.findall(r"^\d+ ([\d.]+)$", printed, re.MULTILINE)
    adamw, ours = [float(x) for x in found[:6]], [float(x) for x in found[6:12]]
    assert max(adamw[-1], ours[-1]) < 2.75 < min(adamw[0], ours[0])
    share = re.search(r"([\d.]+)% of synchronous training", printed)
    assert share
    assert 1.5 < float(share[1]) < 2.5  # the budget is 2%


def test_the_notebook_is_the_page():
    kept = nbformat.read(make_tutorial.NOTEBOOK, as_version=4)
    assert kept.cells == make_tutorial.notebook().cells


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_is_kept_with_its_results(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))  # from top to bottom, in one go
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
