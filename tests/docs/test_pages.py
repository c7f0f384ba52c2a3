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
# A loop of the reader's own around a store on the network, PyTorch (both run in
# `tests/sites/test_page.py`), and a program of several processes
# (`tests/processes/test_processes.py`): names are looked at alone.
FRAGMENTS = ("docs/sites.md", "docs/from-pytorch.md", "docs/multi-host.md")
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    # Made by docs/conf.py, of files that are read here themselves.
    if not page.is_relative_to(ROOT / "docs/repository")
}


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def run(tmp_path: Path, page: str) -> str:
    """What the page's Python prints as one program, on eight devices."""
    code = "\n".join(blocks(page))
    if not re.search(r"^jax.config.update\(.jax_num_cpu_devices", code, re.MULTILINE):
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
def test_the_quick_start_trains_and_sends_nothing_on_a_local_step(tmp_path):
    printed = run(tmp_path, "README.md")
    assert len(losses(printed)) == 5
    assert re.search(r"^every step +nothing$", printed, re.MULTILINE)
    assert re.search(r"^sync +all-to-all ", printed, re.MULTILINE)
    assert re.search(r"^replicas +8$", printed, re.MULTILINE)
    # The numbers that the page has below the program.
    text = " ".join(PAGES["README.md"].split())
    assert f"from {losses(printed)[0]:.2f} to {losses(printed)[-1]:.2f}." in text
    report = dict(re.findall(r"^(share|syncs) +([\d.]+%?)$", printed, re.MULTILINE))
    assert f"{report['syncs']} syncs in 100 steps, and {report['share']} of" in text


@pytest.mark.slow
def test_the_first_program_of_the_site_prints_what_the_page_shows(tmp_path):
    (shown,) = blocks("docs/index.md", "text")
    assert shown in run(tmp_path, "docs/index.md")


@pytest.mark.slow
def test_the_loop_of_the_page_trains(tmp_path):
    printed = losses(run(tmp_path, "docs/own-loop.md"))
    assert len(printed) == 3
    assert printed[-1] < 0.6 * printed[0]


ALONE = [
    page
    for page in PAGES
    if page.startswith("docs/")
    and blocks(page)
    # The tutorial is run as a notebook.
    and page not in (*FRAGMENTS, "docs/own-loop.md", "docs/tutorial.md")
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


def _parts_of_text(node):
    """The parts of a string or an f-string, and none of other nodes."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return [node] if is_string else []


def test_messages_on_the_page_are_those_of_the_library():
    said = [
        "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        for file in (ROOT / "curvadion_jax").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if (parts := _parts_of_text(node))
    ]
    term = r'^<a id="([\w-]+)"></a>`([^`]+)`$'
    terms = re.findall(term, PAGES["docs/troubleshooting.md"], re.MULTILINE)
    names, messages = zip(*terms, strict=True)
    assert len(messages) >= 20
    assert len(set(names)) == len(names)
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.split("…")]
        known = re.compile(".*".join(parts), re.DOTALL)
        assert any(map(known.search, said)), message
