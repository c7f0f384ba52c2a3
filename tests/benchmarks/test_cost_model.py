"""The cost model by hand, and the tables of links and projections on their pages."""

import doctest
import math
from pathlib import Path

import cost_model as cm
import jax
import jax.numpy as jnp
import projections
import pytest
import waiting

from curvadion_jax import DimensionNumbers
from curvadion_jax.compressors import Payload

LINKS = Path(__file__).parents[2] / "benchmarks" / "links"
EXACT = 1e-12
"""Relative: a handful of float64 operations, each good to 1.1e-16."""


def test_examples():
    assert doctest.testmod(cm).failed == 0


def test_payloads_by_hand():
    shapes = {"w": (4, 6), "stack": (3, 5, 5), "b": (10,)}
    size = cm.model_size(
        {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()},
        {"w": DimensionNumbers(0, 1), "stack": DimensionNumbers(1, 2), "b": None},
    )
    assert size.parameters == 24 + 75 + 10
    assert sorted((n, *sorted(x)) for n, *x in size.matrices) == [(1, 4, 6), (3, 5, 5)]
    assert cm.gradient_payload(size) == Payload(4 * 109)
    # Rank 1, a fifth: (6 + 4) + 3 x (5 + 5) + 10 elements. Full rank: all of them.
    assert cm.factor_payload(size, 0.2) == Payload(4 * 50)
    assert cm.factor_payload(size, 1.0) == Payload(4 * 109)


def test_times_by_hand():
    slow = cm.Link(bandwidth=8e9, round_trip_time=0.1)
    # 4 replicas: 6 x 0.05 + 2 x 3/4 x 2 s averaged, 3 x 0.05 + 3 x 1 s gathered.
    times = [cm.ring_time(Payload(*x), 4, slow) for x in ((2e9,), (0, 1e9), (2e9, 1e9))]
    assert times == pytest.approx([3.3, 3.15, 6.45], rel=EXACT)
    assert cm.flag_time(2, cm.Link(math.inf, 0.07)) == pytest.approx(0.07, rel=EXACT)
    hidden = cm.Method(0.3, sync_time=0.5, hidden=0.2)
    assert hidden.step_time == pytest.approx(0.6, rel=EXACT)


MODEL = ["--parameters", "160e6", "--step-time", "0.3", "--round-trip", "0.001"]
KNOWN = [
    cm.Measured("Muon in few bits", 0.07, 2, steps=1.5, seeds=3),
    cm.Measured(cm.LOCAL_MUON, 0.01, 2, steps=2.0, seeds=3),
    cm.Measured(cm.LOCAL_MUON, 0.001, 2, steps=4.0, seeds=1),
]


def rows_at(bandwidth):
    link = cm.Link(bandwidth, round_trip_time=0.0)
    return cm.compare(160_000_000, 0.3, link, known=KNOWN)


def test_seconds_for_a_loss_by_hand():
    # 1.12 GB of gradients on every step, 78.75 MB of codes: 8.96 and 0.63 s.
    whole, half, coded, one, tenth = rows_at(1e9)
    assert whole.time_to_loss == pytest.approx(0.3 + 8.96, rel=EXACT)
    assert half.time_to_loss == pytest.approx(0.3 + 4.48 - 0.2, rel=EXACT)
    assert coded.time_to_loss == pytest.approx(1.5 * (0.3 + 0.63), rel=EXACT)
    assert one.time_to_loss == pytest.approx(2.0 * (0.3 + 0.0896), rel=EXACT)
    assert tenth.time_to_loss == pytest.approx(4.0 * (0.3 + 0.00896), rel=EXACT)
    # Against the fastest synchronous step, which is that of 2 bits.
    pays = 1.5 * 0.93 / 0.3896
    assert cm.break_even(one, rows_at(1e9)) == pytest.approx(pays, rel=EXACT)


@pytest.mark.parametrize(
    ("bandwidth", "first", "words"),
    [
        (1e7, "local_muon, 0.1% of the bytes", "Take local_muon, 0.1% of the bytes"),
        (1e9, "local_muon, 1% of the bytes", "Take local_muon, 1% of the bytes"),
        (1e12, "synchronous, bfloat16 behind the backward pass", "Stay synchronous"),
    ],
)
def test_the_calculator_names_the_share_that_reaches_a_loss_first(
    bandwidth, first, words
):
    rows = rows_at(bandwidth)
    assert cm.fastest(rows).name == first
    assert cm.verdict(rows).startswith(words)
    line = [x for x in cm.speed_table(rows_at) if x.startswith("| 1 Gbit/s |")]
    assert "**local_muon, 1% of the bytes**" in line[0]


def test_the_calculator_prints_and_draws_every_share_of_the_study(capsys, tmp_path):
    file = tmp_path / "links.svg"
    cm.main([*MODEL, "--bandwidth", "1e9", "--picture", str(file)])
    printed, drawn = capsys.readouterr().out, file.read_text("utf-8")
    for known in cm.measured():
        assert f"| {known.name} |" in printed
        assert known.name in drawn
    # 2 x 7/8 x 640 MB of gradients on every step; 1% of that.
    assert "| 1.12e+03 |" in printed
    assert "| 11.2 |" in printed


def test_the_calculator_says_where_nobody_knows_the_steps(capsys):
    cm.main([*MODEL, "--bandwidth", "1e9", "--budget", "0.005"])
    assert "which nobody has measured" in capsys.readouterr().out
    for known in (["0.005", "--steps-needed", "3"], ["0.003"], ["0.001"], ["0.01"]):
        cm.main([*MODEL, "--bandwidth", "1e9", "--budget", *known])
        printed = capsys.readouterr().out
        assert "times as fast" in printed
        assert sum(x.startswith("| local_muon") for x in printed.splitlines()) == 1


def test_the_calculator_counts_arrays_and_what_gloo_waits_for(capsys):
    model = ["--parameters", "1e6", "--step-time", "1", "--replicas", "2"]
    link = ["--bandwidth", "32e6", "--round-trip", "0.1"]
    cm.main([*model, *link])
    # 4 MB take 1 s, and two turns 0.1 s.
    assert "| synchronous, float32 | 4 | 2.1 |" in capsys.readouterr().out
    cm.main([*model, *link, "--gloo", "--arrays", "10"])
    # 1.33 s, and ten times 0.2 s.
    assert "| synchronous, float32 | 4 | 4.33 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("waiting.md", waiting.table()),
        ("projections.md", projections.tables().split("\n")),
    ],
)
def test_pages_have_what_the_commands_print(page, table):
    lines = (LINKS / page).read_text("utf-8").splitlines()
    assert [line for line in table if line and line not in lines] == []
