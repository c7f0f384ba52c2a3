"""The notebook of the tutorial is its page, and trains."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

import make_tutorial  # noqa: E402

# Jupyter's client warns of its own defaults; what the notebook does runs elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_trains(monkeypatch):
    # Compiling takes longer than running here.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    notebook = make_tutorial.run(make_tutorial.notebook())
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", ())]
    printed = "".join(x.text for x in outputs if x.get("name") == "stdout")
    found = re.findall(r"^\d+ ([\d.]+)$", printed, re.MULTILINE)
    losses = [float(x) for x in found]
    assert len(losses) == 3 * 8  # AdamW, local Muon, synchronous Muon
    assert max(losses[7::8]) < 2.2 < 2.5 < min(losses[::8])
    share = re.search(r"^share +([\d.]+)%$", printed, re.MULTILINE)
    assert share
    assert 1.5 < float(share[1]) < 2.5  # the budget is 2%
    assert re.search(r"^every step +nothing$", printed, re.MULTILINE)
    assert "[Message(kind='all-reduce'" in printed  # of clipping around the optimizer


def test_the_notebook_is_the_page_with_what_it_prints():
    kept = nbformat.read(make_tutorial.NOTEBOOK, as_version=4)
    made = make_tutorial.notebook()
    assert [x.source for x in kept.cells] == [x.source for x in made.cells]
    printed = [x.text for cell in kept.cells for x in cell.get("outputs", ())]
    assert any("every step  nothing" in text for text in printed)
    assert str(Path.home()) not in "".join(printed)
