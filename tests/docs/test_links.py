"""Links between pages lead to files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for top in ("docs", "examples", "benchmarks")
        for page in ROOT.glob(f"{top}/**/*.md")
    ),
]


def text(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub and MyST make them of headings."""
    headings = re.findall(r"^#+ (.*)$", text(page), flags=re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in headings)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in words}


def links(page: Path) -> list[str]:
    """Without those to other hosts."""
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text(page))
    return [x for x in found if not re.match(r"\w+://", x)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    missing = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        known = target.exists() and (not anchor or anchor in anchors(target))
        missing += [] if known else [link]
    assert missing == []
