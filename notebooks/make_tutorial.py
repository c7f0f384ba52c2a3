"""Make `tutorial.ipynb` of `docs/tutorial.md`, with what it prints.

python notebooks/make_tutorial.py

It runs the notebook, which takes a few minutes. Needs the extra `test`.
"""

import re
from pathlib import Path

import nbclient
import nbformat
from nbformat import v4

HERE = Path(__file__).parent
PAGE, NOTEBOOK = HERE.parent / "docs/tutorial.md", HERE / "tutorial.ipynb"
INSTALL = """\
import importlib.util, os

os.environ["JAX_PLATFORMS"] = "cpu"  # 8 CPU devices stand for 8 replicas
if importlib.util.find_spec("curvadion_jax") is None:
    # In a clone. Elsewhere, such as in Colab: git+ and the address of the repository.
    %pip install -q "..[examples]\""""


def notebook() -> nbformat.NotebookNode:
    """The page's text and blocks as cells, after one that installs the library."""
    text = PAGE.read_text("utf-8")
    text = text.replace(
        "; with outputs it is a [notebook](../notebooks/tutorial.ipynb)", ""
    )
    text = text.replace("](", "](../docs/")
    # Every other part is a block of Python.
    parts = re.split(r"```python\n(.*?)```\n", text, flags=re.DOTALL)
    cells = [v4.new_markdown_cell(parts[0].strip()), v4.new_code_cell(INSTALL)]
    for number, part in enumerate(parts[1:]):
        new = v4.new_markdown_cell if number % 2 else v4.new_code_cell
        cells.append(new(part.strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    return v4.new_notebook(cells=cells, metadata=metadata)


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Runs all cells, and keeps what they print and nothing of the machine."""
    place = {"metadata": {"path": str(HERE)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=place).execute()
    for cell in notebook.cells:
        cell["metadata"] = {}
        if cell.cell_type == "code":
            is_print = lambda x: x.output_type == "stream" and x.name == "stdout"
            text = "".join(x.text for x in cell.outputs if is_print(x))
            cell["outputs"] = [v4.new_output("stream", text=text)] if text else []
    return notebook


if __name__ == "__main__":
    nbformat.write(run(notebook()), NOTEBOOK)
