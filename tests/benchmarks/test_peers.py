"""The comparison with other people's code, without that code, and the reader of HLO."""

import data
import jax
import layouts
import numpy as np
import peers_table
import pytest
import race
import traffic
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
    joined = layouts.join(arrays, task.params)
    jax.tree.map(np.testing.assert_array_equal, joined, task.params)


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


def test_the_page_has_the_table_of_the_results():
    lines = peers_table.RESULTS.read_text().splitlines()
    rows = [peers_table.json.loads(line) for line in lines]
    page = peers_table.RESULTS.with_name("README.md").read_text("utf-8")
    assert peers_table.table(rows) in page


# Two replicas of two chips: what every step does, what a loop does three times (its
# counter goes up by two, to five), and what a conditional does at syncs.
PROGRAM = """HloModule jit_train, is_scheduled=true, num_partitions=4

%blocks (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %part = f32[8]{0} get-tuple-element(%s), index=1
  %whole = f32[16]{0} all-gather(%part), channel_id=2, replica_groups=[2,2]<=[4]
  %counter = s32[] get-tuple-element(%s), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%counter, %two)
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %part)
}

%three (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%sync (x: f32[8]) -> f32[8] {
  %drift = f32[8]{0} parameter(0)
  %mean = f32[8]{0} all-reduce(%drift), channel_id=3, replica_groups={{0,2},{1,3}}
  ROOT %all = f32[8]{0} all-reduce(%mean), channel_id=5, replica_groups=[1,4]<=[4]
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = (s32[], f32[8]{0}) tuple(%x, %x)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%three, body=%blocks
  ROOT %y = f32[8]{0} conditional(%x, %x), branch_computations={%sync, %sync}
}
"""


def test_transfers_of_a_program_by_hand():
    found = traffic.transfers(PROGRAM, chips=2, slices=1)
    rows = {(x.kind, x.across, x.at_sync, x.times, x.sharers): x for x in found}
    # 32 bytes to one other chip, three times.
    assert rows.pop(("all-gather", False, False, 3, 1)).sent == 96
    # Between two replicas, by one chip of each and by two that share the work.
    assert rows.pop(("all-reduce", True, True, 1, 1)).sent == 32
    assert rows.pop(("all-reduce", True, True, 1, 2)).sent == 16
    assert rows == {}
