"""No words of our own in docs, docstrings and messages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is not written, and what is written in its place.
WORDS = {
    r"(takes?|taking|took) (\w+ )?steps? alone": "take local steps",
    r"(comes?|came|brings?|brought)( \w+){0,2} together": "synchronise, average",
    r"(is|are|was|be) (told|said)|says so in": "is reported, logs a warning",
    r"asks|(is|are) asked|asked for": "votes, reduces a flag, requests",
    "beside": "in addition to, compared with, alongside",
    r"behind the (optimizer|step)": "after",
    r"divided (arrays?|parameters?|states?|matri\w+)": "sharded",
    r"spoil\w*|what is not finite|what is bad": "non-finite, contains NaN or Inf",
    r"owe[sd]?|what it (pays|brings)": "residual, sends, contributes",
    r"(go|goes|went) on": "continues, resumes",
    r"level with": "differs by 0.0 ± 0.6% (3 seeds)",
    r"(is|are) of (?!type|format)|hangs? on": "belongs to, depends on",
    r"on \*all\*|what is trained on": "on all held-out text, on the training text",
    "the law": "the empirical fit",
    r"some \d+": "about",
    r"needs not|lets? (\w+ ){1,3}be": "need not, makes",
    r"(is|are) to (be|become|change|stay|have|write)": "should",
    "for ever": "indefinitely",
    r"(one|two|bytes|rows?|leaf|lines?|numbers?|messages?|lists?) an? "
    r"(layer|parameter|replica|step|method|token|matrix|element|site|round)": "per",
}
PATTERN = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("docs/**/*.rst"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("curvadion_jax/**/*.py"),
]


def prose(file: Path) -> str:
    """A page without its code; of a module its docstrings and messages."""
    text = file.read_text("utf-8")
    if file.suffix == ".py":
        values = (getattr(x, "value", None) for x in ast.walk(ast.parse(text)))
        return "\n\n".join(x for x in values if isinstance(x, str))
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("file", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_words_are_the_fields_own(file):
    text = re.sub(r"\s+", " ", prose(file))
    found = [
        text[max(0, x.start() - 30) : x.end() + 20] for x in PATTERN.finditer(text)
    ]
    assert not found, f"see WORDS for what to write: {found}"
