"""The emulated link's arithmetic, and seconds to a loss by hand."""

import doctest
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

WAN = Path(__file__).parents[2] / "benchmarks" / "links" / "wan"


def load(name):
    spec = importlib.util.spec_from_file_location(name, WAN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


line, wan_table = load("line"), load("wan_table")
EXACT = 1e-9


def test_examples():
    assert doctest.testmod(line).failed == doctest.testmod(wan_table).failed == 0


def test_packets_wait_for_the_rate_and_then_for_the_delay():
    # 1,000 bytes take 8 ms; the bucket lets two packets leave at once.
    found = line.Line(line.Conditions(1e6, round_trip=0.2, mtu=1000), seed=0)
    arrivals = []
    for _ in range(4):
        found.send(0.0, bytes(1000))
    while found.next_arrival() < 1:
        arrivals.append(found.next_arrival())
        assert len(list(found.arrived(arrivals[-1]))) >= 1
    assert arrivals == pytest.approx([0.1, 0.108, 0.116], rel=EXACT)
    assert (found.dropped, found.lost) == (0, 0)


def test_a_full_queue_drops_and_a_bad_line_loses():
    conditions = line.Conditions(1e6, loss=0.5, mtu=1000)
    found = line.Line(conditions, seed=0)
    for _ in range(200):
        found.send(0.0, bytes(1000))
    # 64 in the queue and the two of the bucket, up to rounding at the edge.
    assert 200 - found.dropped == pytest.approx(66, abs=1)
    assert 0 < found.lost < 66


def test_seconds_to_a_loss_are_the_least_over_runs():
    steps = [{"synced": x == 3, "seconds": 1.0 + 4 * (x == 3)} for x in range(4)]
    run = {"curve": {"2": 3.0, "4": 2.0}, "synced": [False, True, False, True]}
    longer = {"curve": {"3": 2.4, "6": 1.0}, "synced": 5 * [False] + [True]}
    time = {"steps": steps}
    assert wan_table.step_times(time) == (1.0, 5.0)
    assert wan_table.seconds_to([run], time, 2.5) == 12.0
    assert wan_table.seconds_to([run], time, 1.0) is None
    assert wan_table.seconds_to([run, longer], time, 2.5) == 3.0
    assert wan_table.seconds_to([run, longer], time, 1.0) == 10.0


@pytest.mark.parametrize(
    ("local", "synchronous", "expected"),
    [
        # Gains of 100 and of a tenth: two thirds of the way from 10 to 1,000 Mbit/s.
        ([1.0, 1.0], [100.0, 0.1], 1e7 * 100 ** (2 / 3)),
        ([1.0, 1.0], [100.0, 1.0], 1e9),
        ([1.0, 1.0], [100.0, 1.1], math.inf),
        ([1.0, 1.0], [0.9, 0.1], 0.0),
    ],
)
def test_break_even_is_between_links_or_outside(local, synchronous, expected):
    found = wan_table.break_even([1e7, 1e9], local, synchronous)
    assert found == pytest.approx(expected, rel=EXACT)


def rows_by_hand():
    """Synchronous Muon takes 5 s a step, of which 1 s is computation."""
    conditions = {"rate": 1e6, "round_trip": 0.2}
    of_link = {"kind": "time", "link": "slow", "conditions": conditions}
    alike = {"received": 0, "seconds": 5.0, "synced": True}
    local = [alike | {"seconds": 1.0, "synced": False}] * 3
    curve = {str(x): 4 - x / 100 for x in range(10, 301, 10)}
    run = {"kind": "loss", "method": "Muon, float32", "share": 1.0}
    rarely = {"synced": [x % 10 == 9 for x in range(300)], "share": 0.01}
    return [
        of_link | {"method": "Muon, float32", "steps": [alike] * 3},
        of_link | {"method": "local_muon", "steps": [*local, alike, alike]},
        of_link | {"method": "DiLoCo", "error": "It took too long."},
        run | {"curve": curve, "synced": [True] * 300},
        run | {"curve": {"30": 0.5}, "synced": [True] * 30},
        run | {"method": "local_muon", "curve": curve} | rarely,
    ]


def test_the_calculator_has_computation_and_the_payload():
    measured = wan_table.Measured(rows_by_hand())
    synchronous, local = measured.times
    # One delay of 0.1 s on each of two turns, and 4 bytes for each parameter.
    wire = 8 * 4 * wan_table.PARAMETERS / 1e6
    assert measured.predicted(synchronous) == pytest.approx(1.2 + wire, rel=EXACT)
    # gloo: two delays a turn, 12 messages, three quarters of the link.
    assert measured.predicted(synchronous, gloo=True) == pytest.approx(
        1 + 12 * 0.4 + wire / 0.75, rel=EXACT
    )
    # 3,333 blocks of 64 bytes of codes and two magnitudes, gathered on one turn.
    codes = 8 * 3333 * 72 / 1e6
    assert measured.predicted(local) == pytest.approx(1.1 + codes, rel=EXACT)


def test_tables_of_several_lengths():
    rows = rows_by_hand()
    text = wan_table.tables(rows)
    # The wanted losses are those of 300 steps; the short run reaches all sooner.
    assert "| **slow** |" in text
    assert "| Muon, float32 |  | 5,000 | 150 | 150 | 150 |" in text
    # 60, 150 and 300 steps, of which a tenth takes 5 s.
    assert "| `local_muon` | 1,000 | 5,000 | 84.0 | 210 | 420 |" in text
    assert "0.500 (30), 1.000 (300)" in text
    rows[-1]["curve"] = {"300": 2.0}
    assert "| 420 | (2.000) |" in wan_table.tables(rows)


def test_the_page_has_what_the_command_prints():
    rows = [
        json.loads(line)
        for line in (WAN / "results" / "rows.jsonl").read_text().splitlines()
    ]
    page = (WAN / "README.md").read_text("utf-8").splitlines()
    missing = [x for x in wan_table.tables(rows).splitlines() if x not in page]
    assert missing == []
