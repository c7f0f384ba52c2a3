"""Links with a clock of the test's own, what is read off programs, and the tables."""

import os
import platform

import cases
import measure
import pytest
import wan_tables
from compare import Times, mean, message_time, sent, speedup, time_to, times
from grid import METHODS, PLANS, Case
from line import Conditions, Line, TokenBucket
from messages import in_program

# 1000 bytes a second.
SLOW = Conditions(rate=8000, mtu=100)
LINK = "10 Mbit/s, 0 ms"
# A loop over three layers, a branch, and what every step does.
PROGRAM = """HloModule jit_step

%layer (s: (s32[], f32[96])) -> (s32[], f32[96]) {
  %both = (f32[96]{0}, /*index=1*/f32[2,2]{1,0}) all-reduce(%a, %b), to_apply=%add
}

%sync.1 (s: f32[2]) -> f32[2] {
  ROOT %all = f32[2]{0} all-gather(%w), dimensions={0}
}

ENTRY %main (x: f32[96]) -> s32[] {
  %loop = (s32[], f32[96]{0}) while(%t), condition=%c, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %flag = s32[] all-reduce(%f), channel_id=1, to_apply=%max
}
"""  # noqa: E501


def arrivals(line: Line, times: list[float]) -> list[list[bytes]]:
    return [list(line.arrived(time)) for time in times]


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    bucket = TokenBucket(rate=8000, burst=200)
    leave = [bucket.departure(5.0, 100) for _ in range(4)]
    assert leave == pytest.approx([5.0, 5.0, 5.1, 5.2])
    assert bucket.backlog(5.0) == pytest.approx(200)


def test_a_pause_saves_tokens_up_to_the_burst():
    bucket = TokenBucket(rate=8000, burst=200)
    bucket.departure(0.0, 500)
    assert bucket.departure(100.0, 300) == pytest.approx(100.1)


def test_packets_arrive_in_order_after_queue_and_delay():
    line = Line(Conditions(rate=8000, round_trip=2.0, mtu=100), seed=0)
    packets = [bytes([number]) * 100 for number in range(3)]
    for packet in packets:
        line.send(0.0, packet)
    assert line.next_arrival() == pytest.approx(1.0)
    assert arrivals(line, [0.9, 1.01, 1.2]) == [[], packets[:2], packets[2:]]
    assert line.next_arrival() == float("inf")


def test_a_full_queue_drops_the_last():
    line = Line(SLOW, seed=0)
    # The burst of two, 64 in the queue, and five that find it full.
    for number in range(71):
        line.send(0.0, bytes([number]) * 100)
    assert line.dropped == 5
    assert [packet[0] for packet in line.arrived(100.0)] == [*range(66)]


def test_losses_are_seeded_and_as_frequent_as_asked():
    def kept(seed: int) -> list[int]:
        line = Line(Conditions(rate=1e12, loss=0.1, mtu=100), seed)
        for number in range(2000):
            line.send(float(number), number.to_bytes(2, "big"))
        found = [int.from_bytes(packet, "big") for packet in line.arrived(1e9)]
        assert len(found) + line.lost == 2000
        return found

    assert kept(1) == kept(1) != kept(2)
    # Four standard deviations of a binomial.
    assert 2000 - len(kept(1)) == pytest.approx(200, abs=54)


def test_a_queue_holds_a_round_trip():
    assert Conditions(rate=8e6, round_trip=1.0).queue == 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"rate": 0.0}, "rate must be positive", id="rate"),
        pytest.param({"rate": 1.0, "round_trip": -1.0}, "round_trip", id="round-trip"),
        pytest.param({"rate": 1.0, "loss": 1.0}, "loss must be a share", id="loss"),
        pytest.param({"rate": 1.0, "mtu": 10}, "mtu must be", id="mtu"),
    ],
)
def test_impossible_links_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Conditions(**arguments)


def run(local: float, synced: float, syncs: list[bool]) -> dict:
    """What a link's record has of a method, and what a loss's record has."""
    steps = len(syncs)
    counters = [1100 * number for number in range(steps + 1)]
    zeros = [0] * (steps + 1)
    end = {"payload": counters, "bytes": counters, "retransmitted": zeros}
    return {
        "payload": {"averaged": 996, "gathered": 0},
        "messages": [["all-reduce", 1000]],
        "seconds": [synced if sync else local for sync in syncs],
        "synced": syncs,
        "bytes": [1000 * number for number in range(1, steps + 1)],
        "loss": [3.0, 2.0, 1.5, 1.25],
        "validation_loss": [3.0, 2.0, 1.5, 1.25],
        "link": [end, end],
    }


@pytest.fixture
def results() -> dict:
    """A sync takes ten times as long as a local step; DiLoCo has every other one."""
    every, other = [True] * 4, [False, True, False, True]
    found = {}
    for name, method in METHODS.items():
        methods = {name: run(1.0, 10.0, other if name == "diloco" else every)}
        case = Case("loss", name, method.rates[0])
        found[case.key()] = {"methods": methods}
    methods = {
        name: found[Case("loss", name, method.rates[0]).key()]["methods"][name]
        for name, method in METHODS.items()
    }
    found[Case("link", LINK).key()] = {
        "conditions": {"rate": 10e6, "round_trip": 0.0, "mtu": 1500},
        "calibration": {"stream": 9e6, "round_trip": 0.001},
        "messages": {"4": 0.001, "1000": 0.002},
        "methods": methods,
    }
    found[Case("alone").key()] = {"processes": [methods, methods]}
    return found


def test_speedups_weigh_local_and_synced_steps(results):
    assert mean(Times(1.0, 10.0), 0.5) == 5.5
    assert speedup(LINK, "diloco", results) == pytest.approx(10 / 5.5)


def test_the_sync_that_compiles_its_program_is_not_counted():
    syncs = [False, False, False, True, False, True]
    found = run(1.0, 10.0, syncs)
    found["seconds"][3] = 500.0
    assert times(found) == (1.0, 10.0)
    # Compiled within the first two steps, which do not count either.
    early = run(1.0, 10.0, [True, *syncs[1:]])
    assert times(early) == (1.0, 10.0)
    # With syncs alone there is one program.
    assert times(run(1.0, 10.0, [True] * 3)).synced == 10.0


def test_time_to_a_loss_counts_the_steps_that_it_takes(results):
    # Three steps, of which one synced.
    assert time_to(1.5, LINK, "diloco", results) == pytest.approx(12.0)
    assert time_to(1.5, LINK, "adamw", results) == pytest.approx(30.0)
    assert time_to(1.0, LINK, "adamw", results) is None


def test_the_best_learning_rate_counts(results):
    better = run(1.0, 10.0, [True] * 4) | {"validation_loss": [2.0, 1.5, 1.5, 1.0]}
    case = Case("loss", "diloco", METHODS["diloco"].rates[1])
    results[case.key()] = {"methods": {"diloco": better}}
    assert time_to(1.5, LINK, "diloco", results) == pytest.approx(20.0)


def test_messages_between_measured_sizes_lie_on_a_line():
    measured = {"100": 2.0, "200": 3.0, "4": 1.0}
    sizes = [1, 100, 150, 300]
    assert [message_time(x, measured) for x in sizes] == [1.0, 2.0, 2.5, 4.0]


def test_bytes_are_compared_after_the_first_steps(results):
    found = sent(LINK, "diloco", results)
    assert found is not None
    assert (found.counted, found.payload, found.retransmitted) == (2000, 2200, 0)


def test_tables_have_a_row_for_what_was_measured(results):
    text = wan_tables.document(results)
    assert f"| {LINK} | 10,000 | 10,000 (1.00) | 5,500 (1.82) | 10,000 (1.00) |" in text
    assert "| DiLoCo, every 30 steps | 10 Mbit/s, 0 ms | 2,000 | +10.0% |" in text
    assert "| within 20% | of 4 |" in text
    assert "100 Mbit/s" not in text
    assert "the 4 runs over links differ between links by 0.0e+00" in text


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        pytest.param(platform, "system", "Windows", "Linux", id="not-linux"),
        pytest.param(os, "geteuid", 1000, "run the benchmark as root", id="not-root"),
    ],
)
def test_elsewhere_it_refuses_in_a_sentence(
    monkeypatch, tmp_path, capsys, module, name, value, message
):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(module, name, lambda: value)
    file = tmp_path / "results.jsonl"
    assert measure.main(["--results", str(file)]) == 1
    assert message in capsys.readouterr().err
    assert not file.exists()


def test_messages_of_a_program_count_loops_and_branches():
    assert in_program(PROGRAM) == [
        *[("all-reduce", 384), ("all-reduce", 16)] * 3,
        ("all-gather", 8),
        ("all-reduce", 4),
    ]


def test_the_committed_tables_are_those_of_the_committed_results():
    found = measure.read_results(measure.RESULTS)
    written = measure.RESULTS.with_suffix(".md").read_text()
    assert written == wan_tables.document(found)


def test_lines_of_two_processes_become_one_record():
    def lines(loss: float) -> list[dict]:
        link = {"payload": 0, "bytes": 0}
        first = {"part": "dion", "step": 0, "time": 10.0, "payload": {}}
        first |= {"link": link, "retransmitted": 0}
        later = {"part": "dion", "step": 1, "time": 10.5, "loss": loss}
        later |= {"synced": True, "bytes": 8, "retransmitted": 2}
        flags = [
            {"part": "messages", "size": 4, "time": time} for time in (1.0, 1.1, 1.3)
        ]
        return [*flags, first, later | {"link": link}]

    # The second process was stopped a line later.
    rows = [lines(1.0), [*lines(2.0), lines(3.0)[-1]]]
    record = cases.measured(rows)["dion"]
    assert (record["seconds"], record["loss"]) == ([0.5], [1.5])
    assert (record["synced"], record["bytes"]) == ([True], [8])
    assert record["link"][1]["retransmitted"] == [0, 2]
    assert cases.message_times(rows[0]) == {"4": pytest.approx(0.15)}


def test_a_partition_is_told_with_the_words_of_the_processes(results):
    failed = "F1122 client.h:80] Ended. absl::Status: DEADLINE_EXCEEDED: late:\nmore"
    (case, *_) = PLANS["partition"]
    record = {
        **{"status": [-6, 0], "output": [failed, ""], "steps": [10, 11]},
        **{"next_step_after_join": None, "ended_after_cut": [12.3, 45.6]},
    }
    text = wan_tables.partitions(results | {case.key(): record})
    assert "| -6, 0 | 10, 11 | none | 12 s, 46 s |" in text
    assert "| DEADLINE_EXCEEDED: late / nothing |" in text
