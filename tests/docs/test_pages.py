"""The code on the site's pages runs as it stands, and the commands name real files."""

import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from make_tutorial import notebook

import curvadion_jax as cd

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# These go on from the quick start of the README (`test_readme`).
TOGETHER = {"guide.md", "sharding.md", "own-loop.md"}
# A loop of the reader's own around a store on the network, and a program of several
# processes (`tests/processes/test_page.py`): names are looked at alone.
FRAGMENTS = {"sites.md", "processes.md"}
PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if "```python" in page.read_text("utf-8") and page.name not in TOGETHER | FRAGMENTS
)


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(name: str, tmp_path: Path) -> str:
    """The page's Python as one program, of eight devices."""
    code = "\n".join(blocks(DOCS / name, "python"))
    set_up = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    if "jax_num_cpu_devices" in code:
        set_up = ""
    program = tmp_path / "page.py"
    program.write_text(set_up + code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PAGES if n != "tutorial.md"])
def test_code_of_a_page_runs(name, tmp_path):
    run(name, tmp_path)


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
def test_a_fragment_names_what_is_there(name):
    for block in blocks(DOCS / name, "python"):
        compile(block, name, "exec")
        for dotted in re.findall(r"\bcd\.([\w.]+)", block):
            assert operator.attrgetter(dotted)(cd)


@pytest.mark.slow
def test_the_tutorial_trains(tmp_path):
    printed = run("tutorial.md", tmp_path)
    rows = re.findall(r"^(\d+) ([\d.]+)$", printed, flags=re.MULTILINE)
    losses = [float(loss) for _, loss in rows]
    adamw, ours = losses[:6], losses[6:12]
    assert max(adamw[-1], ours[-1]) < 2.6 < min(adamw[0], ours[0])
    share = re.search(r"([\d.]+)% of synchronous training", printed)
    assert share
    assert 1.5 < float(share[1]) < 2.5  # the budget is 2%
    assert "(8, 128, 256)\n(128, 256)\n" in printed


def test_the_tutorials_notebook_is_that_page():
    kept = nbformat.read(DOCS / "tutorial.ipynb", as_version=4)
    made = notebook()
    assert [cell.source for cell in kept.cells] == [cell.source for cell in made.cells]


def commands() -> list[tuple[str, str]]:
    places = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
    places += sorted((ROOT / "examples").glob("*/README.md"))
    places += sorted((ROOT / "examples" / "ports").glob("*/README.md"))
    found = []
    for page in places:
        text = page.read_text("utf-8")
        for path in re.findall(r"python\s+([\w./-]+\.py)", text):
            found.append((str(page.relative_to(ROOT)), path))
    return sorted(set(found))


@pytest.mark.parametrize(("page", "path"), commands())
def test_a_command_names_a_file(page, path):
    assert (ROOT / path).is_file() or (ROOT / page).with_name(path).is_file()


def test_every_page_is_on_the_site():
    index = (DOCS / "index.md").read_text("utf-8")
    listed = set(re.findall(r"^[\w\[\]*/-]+$", index, flags=re.MULTILINE))
    missing = [
        page.stem
        for page in DOCS.glob("*.md")
        if page.stem != "index"
        and not any(page.match(f"{entry}.md") for entry in listed)
    ]
    assert missing == []
