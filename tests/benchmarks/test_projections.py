"""The paper's projections by hand, and the tables in docs/projections.md."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from curvadion_jax import cost_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "projections.py"
# Relative: a handful of float64 operations, each good to 1.1e-16.
EXACT = 1e-12


@pytest.fixture(scope="module")
def paper():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_authors_model_has_the_byte_count_of_their_logs(paper):
    assert cost_model.gradient_payload(paper.AUTHORS_MODEL) == 648_806_400
    # The bytes of factors of rank 1/8, as the page states them.
    assert cost_model.factor_payload(paper.AUTHORS_MODEL, 1 / 8) == 372_768_768


def test_a_projection_by_hand(paper):
    row = next(r for r in paper.projections() if r.name == "InfiniBand NDR")
    # T = 14 x 0.6 us + 1.75 x 648,806,400 x 8 bits / 400 Gb/s
    #   = 0.0084 ms + 22.708224 ms; flag = 6 x 0.6 us = 0.0036 ms
    # (298 + 22.716624) / (298 + 0.22716624 + 0.0036 + 6 x 32 bits / 400 Gb/s)
    expected = 320.716624 / (298.23076624 + 4.8e-7)
    assert row.ours == pytest.approx(expected, rel=EXACT)
    assert row.ours_overlapped == 1.0
    assert (row.comes_out, row.comes_out_overlapped) == (False, True)


@pytest.mark.parametrize(
    ("ours", "paper_says", "within"),
    [(1.04, 1.0, True), (0.96, 1.0, True), (1.06, 1.0, False), (0.94, 1.0, False)],
)
def test_within_five_percent(paper, ours, paper_says, within):
    link = cost_model.Link(bandwidth=8e9, round_trip_time=0.1)
    row = paper.Projection("link", link, paper_says, ours, ours_overlapped=9.0)
    assert row.comes_out is within
    assert row.comes_out_overlapped is False
    assert replace(row, paper=None).comes_out is None


def test_every_input_is_varied_through_its_published_value(paper):
    reference = {row.name: row.ours for row in paper.projections()}
    for row in paper.sensitivity():
        assert len(row.values) == len(row.fast) == len(row.slow) > 1
        assert reference["InfiniBand NDR"] in row.fast
        assert reference["regions, US east-west"] in row.slow


def test_flags_of_other_algorithms_by_hand(paper):
    (row,) = (row for row in paper.sensitivity() if row.name == "flag")
    assert row.values == ("tree", "recursive doubling", "hidden")
    # T = 14 x 34.5 ms + 1.75 x 648,806,400 x 8 bits / 5 Gb/s; the tree's 6 messages in
    # a row of 34.5 ms and 32 bits at 5 Gb/s, half of them, and none.
    sync = 14 * 0.0345 + 1.75 * 648_806_400 * 8 / 5e9
    for messages, found in zip((6, 3, 0), row.slow, strict=True):
        step = 0.298 + 0.01 * sync + messages * (0.0345 + 32 / 5e9)
        assert found == pytest.approx((0.298 + sync) / step, rel=EXACT)


def test_rows_of_the_tables(paper):
    def cells(table, line):
        return [cell.strip() for cell in table.splitlines()[line].split("|")]

    assert cells(paper.projections_table(), 3) == [
        *("InfiniBand NDR", "400", "0.0012", "1.02", "1.08", "1.00", "no / yes")
    ]
    assert cells(paper.sensitivity_table(), 2) == [
        *("sync rate", "0.67%, 1%, 3%", "1.08, 1.08, 1.07", "4.99, 4.92, 4.53*")
    ]


def test_the_document_has_the_tables_that_the_command_prints(paper, capsys):
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == f"{paper.projections_table()}\n\n{paper.sensitivity_table()}\n"
    document = (ROOT / "docs" / "projections.md").read_text(encoding="utf-8")
    blocks = document.split("```text\n")[1:]
    tables = [block.split("```")[0] for block in blocks]
    assert tables == [
        f"{paper.projections_table()}\n",
        f"{paper.sensitivity_table()}\n",
    ]
