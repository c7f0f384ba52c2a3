"""What the comparison with other people's code does without that code."""

import data
import jax
import layouts
import numpy as np
import peers_table
import pytest
import race
from runs import Run
from sizes import SIZES

import curvadion_jax as cd


@pytest.fixture(scope="module")
def task():
    run = Run("", 0.0, steps=4, replicas=2)
    return race.Task(run, SIZES["test"], data.load(None))


def test_layouts_are_torchs_and_lose_nothing(task):
    arrays = layouts.split(task.params)
    assert arrays["blocks/up/kernel/0"].shape == (64, 16)  # fan_out first
    assert arrays["blocks/mlp_norm/scale/0"].shape == (16,)
    assert arrays["embed/embedding"].shape == (256, 16)
    jax.tree.map(
        np.testing.assert_array_equal, layouts.join(arrays, task.params), task.params
    )


def test_replicas_are_split_and_joined(task):
    two = jax.tree.map(lambda x: np.stack([x, 2 * x]), task.params)
    replicas = layouts.split_replicas(two)
    np.testing.assert_array_equal(
        replicas[1]["embed/embedding"], 2 * replicas[0]["embed/embedding"]
    )
    joined = layouts.join_replicas(replicas, task.params)
    jax.tree.map(np.testing.assert_array_equal, joined, two)


@pytest.mark.slow
def test_a_race_says_how_far_apart_two_end(task):
    tx = cd.presets.local_sgd(0.1, k=2, axis_name=race.AXIS)
    trainers = {
        "ours": race.Ours(task, tx),
        "same": race.Ours(task, tx),
        "nudged": race.Ours(task, tx, nudge=True),
    }
    found = race.race(task, trainers)
    assert found["loss"]["same"] == found["loss"]["ours"]
    assert found["distance"]["same"] == dict.fromkeys((1, 2, 3, 4), 0.0)
    assert 0 < min(found["distance"]["nudged"].values())
    assert max(found["distance"]["nudged"].values()) < 1e-3


def test_a_nudge_is_one_rounding(task):
    tx = cd.presets.local_sgd(0.1, axis_name=race.AXIS)
    plain, nudged = (race.Ours(task, tx, nudge=nudge) for nudge in (False, True))
    apart = race.relative_distance(nudged.params, plain.params)
    assert 2.0**-24 < apart <= 2.0**-23 * (1 + 2.0**-23)


def test_tables_take_every_seed_and_step():
    row = {"peer": "them", "setting": "s", "until": 10, "steps": 10}
    rows = [
        row
        | {
            "seed": seed,
            "loss": {"ours": 2.0, "theirs": 2.02},
            "distance": {"theirs": {"1": 0.0, "10": 0.1, "2": 0.01}},
        }
        for seed in (0, 1)
    ]
    assert peers_table.table(rows).splitlines()[-1] == (
        "| them, s | theirs | 0: 2.0200, 1: 2.0200 | 1.00 ± 0.00% | 1.0e-01 |"
    )
    assert peers_table.steps(rows).splitlines()[-1] == (
        "| them | theirs | 0e+00 | 1e-02 | 1e-01 |"
    )


def test_stored_results_have_what_the_table_needs():
    lines = peers_table.RESULTS.read_text().splitlines()
    assert lines
    assert "microsoft/dion" in peers_table.RESULTS.read_text()
