"""The code on README and pages runs as it stands; commands and links lead somewhere."""

import ast
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import curvadion_jax as cd

ROOT = Path(__file__).parents[2]
# One program: the quick start, and the pages that go on from it.
QUICK_START = ("README.md", "docs/sharding.md", "docs/own-loop.md")
# A loop of the reader's own around a store on the network, and a program of several
# processes (`tests/processes/test_processes.py`): names are looked at alone.
FRAGMENTS = ("docs/sites.md", "docs/multi-host.md")
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in sorted(ROOT.glob(pattern))
}


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def run(tmp_path: Path, *pages: str) -> str:
    """What the pages' Python prints as one program, on eight devices."""
    code = "\n".join(block for page in pages for block in blocks(page))
    if "\njax.config.update('jax_num_cpu_devices'" not in code.replace('"', "'"):
        code = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n" + code
    program = tmp_path / "page.py"
    program.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^\d+ ([\d.]+)$", printed, re.MULTILINE)]


@pytest.mark.slow
def test_the_quick_start_trains_and_the_pages_go_on_from_it(tmp_path):
    printed = run(tmp_path, *QUICK_START)
    quick_start, own_loop = losses(printed)[:5], losses(printed)[-3:]
    assert quick_start[-1] < quick_start[0] / 2
    assert own_loop[-1] < own_loop[0] / 2
    assert re.search(r"^replicas +8$", printed, re.MULTILINE)


ALONE = [
    page
    for page in PAGES
    if page.startswith("docs/")
    and blocks(page)
    # The tutorial is run as a notebook.
    and page not in (*QUICK_START, *FRAGMENTS, "docs/tutorial.md")
]


@pytest.mark.slow
@pytest.mark.parametrize("page", ALONE)
def test_code_of_a_page_runs(page, tmp_path):
    run(tmp_path, page)


@pytest.mark.parametrize("page", FRAGMENTS)
def test_a_fragment_names_what_is_there(page):
    for block in blocks(page):
        compile(block, page, "exec")
        for dotted in re.findall(r"\bcd\.([\w.]+)", block):
            assert operator.attrgetter(dotted)(cd)


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_files(page):
    for path in re.findall(r"python\s+([\w./-]+\.py)", PAGES[page]):
        assert (ROOT / path).is_file() or (ROOT / page).parent.joinpath(
            path
        ).is_file(), path


def test_ci_runs_the_test_command_of_the_readme():
    command = next(x for x in blocks("README.md", "bash") if "pytest" in x)
    script = (ROOT / ".ci/run").read_text().replace(" --quiet", "")
    for part in command.strip().split(" && "):
        assert part in script


def prose(page: str) -> str:
    return re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)


def anchors(page: str) -> set[str]:
    """As GitHub and MyST make them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in headings)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))
    for link in (x for x in found if not re.match(r"\w+:", x)):
        file, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), link


def test_messages_on_the_page_are_those_of_the_library():
    said = [
        node.value
        for file in (ROOT / "curvadion_jax").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    section = re.split(r"^## ", PAGES["docs/troubleshooting.md"], flags=re.MULTILINE)[2]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    messages = [x for row in rows for x in re.findall(r"`([^`]+)`", row)]
    assert len(messages) >= 10
    assert [x for x in messages if not any(x in text for text in said)] == []
