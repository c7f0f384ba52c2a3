"""Make ``docs/tutorial.ipynb`` of ``docs/tutorial.md``: its prose and code as cells.

python tests/support/make_tutorial.py
"""

import re
from pathlib import Path

import nbformat

DOCS = Path(__file__).parents[2] / "docs"


def cells(page: str) -> list[nbformat.NotebookNode]:
    """A cell for every block of code, and for the text between."""
    found = []
    parts = re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)
    for index, part in enumerate(parts):
        if not part.strip():
            continue
        if index % 2:
            found.append(nbformat.v4.new_code_cell(part.rstrip()))
        else:
            found.append(nbformat.v4.new_markdown_cell(part.strip()))
    for index, cell in enumerate(found):
        cell["id"] = f"cell-{index}"
    return found


def notebook() -> nbformat.NotebookNode:
    """The notebook, without outputs."""
    made = nbformat.v4.new_notebook()
    made.cells = cells((DOCS / "tutorial.md").read_text("utf-8"))
    return made


def main() -> None:
    nbformat.write(notebook(), DOCS / "tutorial.ipynb")


if __name__ == "__main__":
    main()
