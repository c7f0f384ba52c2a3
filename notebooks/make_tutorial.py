"""Make `tutorial.ipynb` of `docs/tutorial.md`, for Colab and Jupyter.

python notebooks/make_tutorial.py
"""

import re
from pathlib import Path

import nbformat
from nbformat import v4

HERE = Path(__file__).parent
PAGE, NOTEBOOK = HERE.parent / "docs/tutorial.md", HERE / "tutorial.ipynb"
INSTALL = """\
import importlib.util, os

os.environ["JAX_PLATFORMS"] = "cpu"  # 8 CPU devices stand for 8 replicas
# Before the first release: build a wheel, upload it, and name it here.
if importlib.util.find_spec("curvadion_jax") is None:
    %pip install -q curvadion-jax flax"""


def notebook() -> nbformat.NotebookNode:
    """The page's text and blocks as cells, after one that installs the library."""
    text = PAGE.read_text("utf-8").replace("](", "](../docs/")
    # Every other part is a block of Python.
    parts = re.split(r"```python\n(.*?)```\n", text, flags=re.DOTALL)
    cells = [v4.new_markdown_cell(parts[0].strip()), v4.new_code_cell(INSTALL)]
    for number, part in enumerate(parts[1:]):
        new = v4.new_markdown_cell if number % 2 else v4.new_code_cell
        cells.append(new(part.strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})


if __name__ == "__main__":
    nbformat.write(notebook(), NOTEBOOK)
