"""The benchmark of what kills cost: who is struck when, and what it says."""

import kills
import numpy as np


def test_sites_are_struck_at_the_same_steps_on_every_run():
    found = kills.strikes(12, seed=1)
    assert found == kills.strikes(12, seed=1)
    assert len(found) == 12
    assert set(found.values()) <= set(range(kills.SITES))
    assert kills.strikes(0, seed=1) == {}


def test_only_the_sites_of_a_mask_are_new():
    old, new = np.zeros((4, 2)), np.ones((4, 2))
    found = kills.only(np.arange(4) == 2, {"w": new}, {"w": old})
    np.testing.assert_array_equal(found["w"][:, 0], [0, 0, 1, 0])


def test_the_table_has_means_over_seeds():
    rows = [
        {"kind": kind, "kills": many, "seed": seed, "taken": 1800, "loss": 1.5 + seed}
        for kind, many in kills.CASES
        for seed in range(2)
    ]
    first = kills.table(rows).splitlines()[2]
    assert first == "| none | 0 | 1800 | 2.0000 | 1.5000, 2.5000 |"
