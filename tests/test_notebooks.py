"""The notebooks run from top to bottom at a small size, and are kept with results."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Jupyter's client warns of its own defaults; what the notebooks do runs elsewhere.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_runs_at_a_small_size(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CURVADION_NOTEBOOK_STEPS", "6")
    monkeypatch.setenv("CURVADION_NOTEBOOK_RESULTS", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_with_its_results(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("text" in output for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert not any("RESULT" in cell.source for cell in notebook.cells)


def test_there_is_one_for_each_question():
    assert [path.stem for path in NOTEBOOKS] == [
        "adaptive_against_fixed",
        "rmmc_over_training",
        "threshold_sweep",
    ]
