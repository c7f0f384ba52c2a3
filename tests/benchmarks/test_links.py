"""The table of links and budgets: rows by hand, and the page's copy."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
# The same few products and sums in float64, in another order.
RTOL = 1e-12


@pytest.fixture(scope="module")
def links():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "links.py")))


@pytest.fixture
def case(links):
    """A model of 1e9 parameters and a link of 1 Gb/s and 50 ms."""
    (training,) = (each for each in links.TRAININGS if each.name == "1B")
    return training, links.LINKS["1 Gb/s, 50 ms"]


# A replica takes 2^18 tokens through 8 chips.
COMPUTE = 6 * 1e9 * 2**18 / (8 * 0.4 * 989e12)
# 2 * 7 / 8 of the bytes are sent, in 2 * 7 messages of 25 ms.
GRADIENTS = 1.75 * 4e9 * 8 / 1e9 + 14 * 0.025
# 1e9 / 256 blocks of 64 bytes of codes and two scales of 4.
SYNC_BYTES = 3_906_250 * 72
SYNC = 1.75 * SYNC_BYTES * 8 / 1e9 + 14 * 0.025
# Three rounds up and three down, of four bytes.
FLAG = 6 * (0.025 + 4 * 8 / 1e9)


def test_synchronous_gradients_by_hand(links, case):
    expected = GRADIENTS / (COMPUTE + GRADIENTS)
    share = links.synchronous(*case).communication_share
    assert share == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize(("budget", "period"), [(0.1, 1), (0.01, 7), (0.001, 70)])
def test_budgets_by_hand(links, case, budget, period):
    rate = min(1, budget * 4e9 / SYNC_BYTES)
    # The flag takes 0.15 s, less than the computation, which can hide it whole.
    flags = {"asked": FLAG, "hidden": 0, "rare": FLAG / period}
    methods = links.budgeted(*case, budget)
    assert methods.keys() == flags.keys()
    for name, flag in flags.items():
        wait = rate * SYNC + flag
        expected = wait / (COMPUTE + wait)
        share = methods[name].communication_share
        assert share == pytest.approx(expected, rel=RTOL)


def test_a_row_by_hand(links):
    (row,) = (
        row for row in links.rows() if (row[0], row[2]) == ("1B", "1 Gb/s, 50 ms")
    )
    # 56.35 s for gradients and 0.497 s of computation; syncs of 4.29 s in all, 14.2%
    # and 1.42% of the steps, and up to 0.15 s for the flag: 4.44 of 4.93 s, ...
    assert row == (
        *("1B", "0.50 s", "1 Gb/s, 50 ms", "99%"),
        *("90%", "60% / 55% / 56%", "30% / 11% / 11%"),
        # 4.29 / 0.497 = 8.6; 14.2% of 4.29 s is 0.610 s, and 0.497 s of that is hidden.
        *("9", "18% / 0.0%"),
        # 0.05 / 0.95 of 0.497 s is 0.610% of a sync, that of 7.03%.
        *("0.043%", "164"),
    )


def test_the_largest_budget_waits_as_long_as_is_tolerated(links):
    for training in links.TRAININGS:
        for link in links.LINKS.values():
            budget = links.largest_budget(training, link)
            method = links.budgeted(training, link, budget)["hidden"]
            assert method.communication_share == pytest.approx(0.05, rel=RTOL)


def test_the_largest_budget_is_no_more_than_all_and_no_less_than_none(links, case):
    training, link = case
    fast = links.Link(1e15, 0.0)
    every_step = SYNC_BYTES / 4e9
    assert links.largest_budget(training, fast) == pytest.approx(every_step, rel=RTOL)
    # A flag of 6 s cannot be hidden behind half a second, whatever is sent.
    assert links.largest_budget(training, links.Link(link.bandwidth, 2.0)) == 0


def test_the_page_has_this_table(links):
    table = links.table()
    lines = (ROOT / "docs" / "links.md").read_text().splitlines()
    start = lines.index(table[0])
    assert lines[start : lines.index("", start)] == table
