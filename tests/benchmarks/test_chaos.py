"""The benchmark of sites under faults: what it does when."""

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
