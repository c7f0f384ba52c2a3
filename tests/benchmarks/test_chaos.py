"""The benchmark of sites under faults: what it does when, and what it says."""

import chaos


def test_faults_come_at_the_same_times_on_every_run():
    names = [f"site{index}" for index in range(4)]
    everything = chaos.RUNS["all faults"]
    events = chaos.schedule(everything, 240, names, seed=0)
    assert events == chaos.schedule(everything, 240, names, seed=0)
    assert events == sorted(events)
    kinds = [what for _, what, _ in events]
    assert kinds.count("kill") == 3
    for first, second in (("stop", "continue"), ("cut", "mend"), ("full", "empty")):
        assert kinds.index(first) < kinds.index(second)
    assert chaos.schedule(chaos.RUNS["undisturbed"], 240, names, seed=0) == []


def test_the_table_has_programs_and_sites():
    rows = [
        {"run": "a", "minutes": 4.0, "kills": 3, "goodput": 0.9, "loss": 1.5}
        | {"restarts": 3, "rounds": 30, "counted twice": 0, "rounds lost": 0},
        {"run": "b", "minutes": 4.0, "kills": 3, "goodput": 0.4, "loss": 1.6}
        | {"restarts": 3},
    ]
    first, second = chaos.table(rows).splitlines()[2:]
    assert first == "| a | 4.0 | 3 | 90.0% | 1.5000 | 30 | 3 | 0 | 0 |"
    assert second == "| b | 4.0 | 3 | 40.0% | 1.6000 |  | 3 |  |  |"
