"""The emulated link's arithmetic, and seconds to a loss by hand."""

import doctest
import importlib.util
import sys
from pathlib import Path

import pytest

WAN = Path(__file__).parents[2] / "benchmarks" / "wan"


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


def test_seconds_to_a_loss_count_steps_and_syncs():
    steps = [{"synced": x == 3, "seconds": 1.0 + 4 * (x == 3)} for x in range(4)]
    loss = {"curve": {"2": 3.0, "4": 2.0}, "synced": [False, True, False, True]}
    assert wan_table.step_times({"steps": steps}) == (1.0, 5.0)
    assert wan_table.seconds_to(loss, {"steps": steps}, 2.5) == 12.0
    assert wan_table.seconds_to(loss, {"steps": steps}, 1.0) is None
