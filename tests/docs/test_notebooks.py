"""The notebooks run from top to bottom at a small size."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(900)  # several programs, of which each compiles
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Jupyter's client warns of its own defaults; what the notebooks do runs elsewhere.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_runs_at_a_small_size(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CURVADION_NOTEBOOK_STEPS", "12")
    monkeypatch.setenv("CURVADION_NOTEBOOK_RESULTS", str(tmp_path))
    # Compiling takes longer than running here.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_with_its_results(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))  # from top to bottom, in one go
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(output.get("name") == "stdout" for output in outputs)
    assert cells[-1].source.startswith("## What came out")
