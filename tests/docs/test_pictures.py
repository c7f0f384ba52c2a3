"""Pictures of the pages are legible on a phone, in light and dark."""

import itertools
import re
from pathlib import Path

import pytest
import themed

ROOT = Path(__file__).parents[2]
PICTURES = [*ROOT.glob("docs/pictures/*.svg"), *ROOT.glob("benchmarks/**/*.svg")]
# As furo shows a picture that is wider than a window of 390 pixels.
SHOWN, SMALLEST = 364, 10
# WCAG's levels for text, and for lines that carry a meaning.
OF_TEXT, OF_LINES = 4.5, 3.0
PAGES = {"light": ("#ffffff", "#f8f9fb"), "dark": ("#131416", "#1a1c1e")}


def luminance(color: str) -> float:
    """Relative luminance, by WCAG."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted(luminance(color) + 0.05 for color in (one, other))
    return high / low


def test_all_pictures_are_found():
    names = {file.name for file in PICTURES}
    assert names >= {"idea.svg", "curve.svg", "rmmc.svg", "seconds.svg"}


def test_the_contrast_of_black_and_white():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("theme", PAGES)
@pytest.mark.parametrize("name", [x for x in themed.COLORS if x != "faint"])
def test_colours_stand_out_from_the_page(name, theme):
    color = themed.COLORS[name][list(PAGES).index(theme)]
    needed = OF_LINES if name == "line" else OF_TEXT
    assert min(contrast(color, page) for page in PAGES[theme]) >= needed


@pytest.mark.parametrize("file", PICTURES, ids=lambda x: x.name)
def test_a_picture_is_narrow_and_its_text_is_not_small(file):
    text = file.read_text("utf-8")
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
    assert width <= themed.WIDTH
    sizes = [float(x) for x in re.findall(r"font-size: ([\d.]+)px", text)]
    assert len(sizes) >= 5
    assert min(sizes) * SHOWN / width >= SMALLEST


@pytest.mark.parametrize("file", PICTURES, ids=lambda x: x.name)
def test_a_picture_has_no_background_and_no_colour_of_its_own(file):
    style, *rest = file.read_text("utf-8").split("</style>", 1)
    assert "currentColor" in rest[0]
    assert re.findall(r"#[0-9a-f]{6}\b", rest[0].replace('href="#', "")) == []
    for name, theme in itertools.product(themed.COLORS, (0, 1)):
        assert f"--{name}: {themed.COLORS[name][theme]}" in style
