"""Every wrong use of the table gets an error that says what was given and what to do.

The table lies in `wrong_uses`, one module a part of the library.
"""

import re
from pathlib import Path

import pytest
from wrong_uses.case import outcome
from wrong_uses.page import SECTIONS, row

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
ROWS = [(title, case) for title, cases in SECTIONS.items() for case in cases]
# The piece that says what to do has one of these words.
ADVICE = re.compile(
    r"\b(must|needs?|such as|ten percent|between|give|pass|call|use|make|name|leave|"
    r"remove|restore|save|build|rename|reduce|differentiate|return|freeze|move|mend|"
    r"keep|copy|take|list|before|see|replicate|takes)\b",
    re.IGNORECASE,
)


def table(text: str) -> dict[str, list[str]]:
    """Title of a section -> the lines of its table."""
    sections = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    return {
        title: [line for line in body.splitlines() if line.startswith("| ")][1:]
        for title, body in pairs
    }


@pytest.fixture(scope="module")
def documented() -> dict[str, list[str]]:
    return table(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(
    ("title", "case"), [pytest.param(t, case, id=case.name) for t, case in ROWS]
)
def test_it_is_refused_with_what_to_do(title, case, documented):
    kind, message = outcome(case)
    assert kind is case.error, message
    assert case.given in message
    assert case.advice in message
    assert ADVICE.search(case.advice)
    assert row(case, message) in documented[title], (
        "run tests/support/make_wrong_uses.py"
    )


def test_the_page_has_no_other_rows(documented):
    assert {title: len(lines) for title, lines in documented.items()} == {
        title: len(cases) for title, cases in SECTIONS.items()
    }
    names = [(title, case.name) for title, case in ROWS]
    assert len(set(names)) == len(names) >= 60
