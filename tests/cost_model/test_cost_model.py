"""The cost model: bytes, times, break-even, and the table in docs/projections.md."""

import itertools
import math
import pathlib
import runpy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvadion_jax import cost_model as cm
from curvadion_jax.compressors import Payload
from curvadion_jax.cost_model import _projections

EXACT = 1e-12
"""Relative: a handful of float64 operations, each good to 1.1e-16."""

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "projections.md"
HALF: Any = 2.5
"""Not a whole number; of no type, so that a type checker lets it pass."""

SLOW = cm.Link(bandwidth=8e9, round_trip_time=0.1)


def small_model():
    """A 6 x 4 matrix, a stack of three 5 x 5 ones, and 10 elements: 109 in all."""
    matrices = (cm.MatrixShape(1, 6, 4), cm.MatrixShape(3, 5, 5))
    return cm.ModelSize(matrices, other_elements=10)


@pytest.mark.parametrize(
    ("replicas", "sent"),
    # 2 (N-1)/N x 8 bytes: 0, 8, 2 x 2/3 x 8 = 32/3, 12, 14
    [(1, 0.0), (2, 8.0), (3, 32 / 3), (4, 12.0), (8, 14.0)],
)
def test_all_reduce_bytes_by_hand(replicas, sent):
    assert cm.all_reduce_bytes(8, replicas) == pytest.approx(sent, rel=EXACT)


def test_payloads_by_hand():
    size = small_model()
    # 24 + 75 + 10 elements
    assert size.parameters == 109
    assert cm.gradient_payload(size) == 436
    # rank 1: (6 + 4) + 3 x (5 + 5) + 10 = 50 elements of 4 bytes
    assert cm.factor_payload(size, rank=1) == 200
    # parameters and 99 elements of momentum
    assert cm.reconcile_payload(size) == 4 * (109 + 99)
    assert cm.reconcile_payload(size, average_momentum=False) == 436
    assert cm.reconcile_payload(size, itemsize=2) == 2 * (109 + 99)


def test_a_matrix_is_sent_whole_where_factors_are_not_smaller():
    # 6 x 4 at rank 2: 20 < 24, factors. At rank 3: 30 >= 24, whole.
    assert cm.MatrixShape(1, 6, 4).factor_elements(2) == 20
    assert cm.MatrixShape(1, 6, 4).factor_elements(3) == 24
    # 4 x 4 at rank 2: 16 = 16, whole either way.
    assert cm.MatrixShape(2, 4, 4).factor_elements(2) == 32


@pytest.mark.parametrize(
    ("rank", "resolved"),
    [(1, 1), (4, 4), (9, 5), (1.0, 5), (0.5, 3), (0.01, 1)],
    ids=["one", "int", "clipped", "full", "rounded up", "at least one"],
)
def test_rank_of_a_matrix_whose_smaller_side_is_5(rank, resolved):
    assert cm.MatrixShape(1, 7, 5).resolve_rank(rank) == resolved
    assert cm.MatrixShape(1, 5, 7).resolve_rank(rank) == resolved


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct, jnp.zeros])
def test_model_size_of_a_tree(leaf):
    params = {"w": leaf((3, 5, 5), jnp.float32), "b": [leaf((10,), jnp.float32)]}
    size = cm.model_size(params, [cm.MatrixShape(3, 5, 5)])
    assert size == cm.ModelSize((cm.MatrixShape(3, 5, 5),), other_elements=10)


@pytest.mark.parametrize("count", [109, np.int64(109)], ids=["int", "numpy"])
def test_model_size_of_a_count(count):
    assert cm.model_size(count, small_model().matrices) == small_model()


def test_bytes_per_step_by_hand():
    # 3 of 100 syncs of 400 bytes, and the flag: N=2 sends exactly its payload
    assert cm.bytes_per_step(400, 2, 0.03) == pytest.approx(16.0, rel=EXACT)
    assert cm.bytes_per_step(400, 2, 0.03, flag=False) == pytest.approx(12.0, rel=EXACT)
    assert cm.bytes_per_step(400, 1, 0.03) == 0.0


def test_payloads_add_up_by_kind():
    parts = [Payload(averaged=1, gathered=10), Payload(2, 20), Payload(gathered=5)]
    assert sum(parts, Payload()) == Payload(averaged=3, gathered=35)


def test_bytes_of_both_kinds_by_hand():
    # N=4: an all-reduce sends 2 x 3/4 of its bytes, an all-gather 3 times its bytes.
    assert cm.sync_bytes(Payload(averaged=8, gathered=5), 4) == 12 + 15
    assert cm.sync_bytes(8, 4) == cm.all_reduce_bytes(8, 4) == 12
    assert cm.all_gather_bytes(5, 4) == 15
    assert cm.sync_bytes(Payload(8, 5), 1) == 0
    mixed = cm.bytes_per_step(Payload(8, 5), 4, 0.5, flag=False)
    assert mixed == pytest.approx(13.5, rel=EXACT)


@pytest.mark.parametrize("gathered", [0, 30])
@pytest.mark.parametrize("replicas", [2, 5, 64])
def test_share_is_the_ratio_of_bytes_for_any_number_of_replicas(replicas, gathered):
    size = small_model()
    payload = Payload(cm.reconcile_payload(size), gathered)
    ours = cm.bytes_per_step(payload, replicas, 0.1)
    whole = cm.bytes_per_step(cm.gradient_payload(size), replicas, flag=False)
    share = cm.share_of_synchronous(
        payload, size, 0.1, replicas=replicas if gathered else None
    )
    assert share == pytest.approx(ours / whole, rel=EXACT)


def test_synchronous_gradients_are_100_percent():
    size = small_model()
    payload = cm.gradient_payload(size)
    assert cm.share_of_synchronous(payload, size, flag=False) == 1.0


def test_times_by_hand():
    # 4 replicas, 50 ms one way, 1e9 bytes/s: 6 x 0.05 + 2 x 3/4 x 2e9/1e9 = 0.3 + 3
    assert cm.ring_time(2e9, 4, SLOW) == pytest.approx(3.3, rel=EXACT)
    # 3 x 0.05 + 3 x 1e9/1e9 for what is gathered, alone or after that
    gathered = Payload(gathered=10**9)
    assert cm.ring_time(gathered, 4, SLOW) == pytest.approx(3.15, rel=EXACT)
    both = gathered + Payload(averaged=2 * 10**9)
    assert cm.ring_time(both, 4, SLOW) == pytest.approx(3.3 + 3.15, rel=EXACT)
    # ceil(log2 5) = 3 messages of 0.05 + 1e6/1e9 s; the tree has them twice
    assert cm.recursive_doubling_time(1e6, 5, SLOW) == pytest.approx(0.153, rel=EXACT)
    assert cm.tree_time(1e6, 5, SLOW) == pytest.approx(0.306, rel=EXACT)


def test_a_flag_between_two_replicas_takes_one_round_trip():
    link = cm.Link(math.inf, 0.07)
    assert cm.tree_time(cm.FLAG_BYTES, 2, link) == pytest.approx(0.07, rel=EXACT)


def test_flags_by_hand():
    # 4 bytes at 1e9 bytes/s; up and down for 8 replicas is 6 x 0.05 s, 5 replicas too.
    whole = 6 * (0.05 + 4e-9)
    for replicas in (5, 8):
        assert cm.flag_time(replicas, SLOW) == pytest.approx(whole, rel=EXACT)
    half = cm.flag_time(8, SLOW, algorithm=cm.recursive_doubling_time)
    assert half == pytest.approx(whole / 2, rel=EXACT)
    assert cm.flag_time(1, SLOW) == 0.0


@pytest.mark.parametrize(
    ("ask_every", "hidden_behind", "share"),
    [
        pytest.param(10, 0.0, 1 / 10, id="every-10"),
        pytest.param(1, 0.1, 2 / 3, id="a-third-hidden"),
        pytest.param(1, 0.3, 0.0, id="hidden"),
        pytest.param(1, 9.0, 0.0, id="longer-steps-gain-nothing"),
        pytest.param(4, 0.1, 1 / 6, id="both"),
    ],
)
def test_a_flag_that_is_hidden_or_rare(ask_every, hidden_behind, share):
    link = cm.Link(math.inf, 0.1)  # 6 x 0.05 s
    seconds = cm.flag_time(8, link, ask_every=ask_every, hidden_behind=hidden_behind)
    assert seconds == pytest.approx(share * 0.3, rel=EXACT, abs=1e-16)


def test_bytes_of_a_rare_flag():
    # 4 bytes on every 8th step.
    assert cm.bytes_per_step(400, 2, 0.03, ask_every=8) == pytest.approx(
        12.5, rel=EXACT
    )
    size = small_model()
    rare = cm.share_of_synchronous(436, size, 0.1, ask_every=8)
    assert rare == pytest.approx((43.6 + 0.5) / 436, rel=EXACT)
    assert cm.bytes_per_step(400, 2, 0.03, flag=False, ask_every=8) == 12.0


TIMES = [cm.ring_time, cm.tree_time, cm.recursive_doubling_time]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(
    ("payload", "replicas"), [(1e9, 1), (0, 8)], ids=["one", "empty"]
)
def test_one_replica_or_no_payload_takes_no_time(time, payload, replicas):
    assert time(payload, replicas, SLOW) == 0.0


@pytest.mark.parametrize("time", TIMES)
def test_times_grow_with_payload_replicas_and_round_trip_and_fall_with_bandwidth(time):
    def increasing(values):
        return all(a < b for a, b in itertools.pairwise(values))

    assert increasing(time(b, 8, SLOW) for b in (1, 10, 1e6, 1e9))
    assert increasing(time(1e6, n, SLOW) for n in (1, 2, 4, 8, 16))
    assert increasing(
        time(1e6, 8, replace(SLOW, round_trip_time=t)) for t in (0, 0.01, 1.0)
    )
    assert increasing(
        time(1e6, 8, replace(SLOW, bandwidth=b)) for b in (1e12, 1e9, 1e6)
    )


def test_the_tree_is_faster_for_the_flag_and_the_ring_for_gradients():
    assert cm.tree_time(4, 8, SLOW) < cm.ring_time(4, 8, SLOW)
    assert cm.ring_time(1e9, 8, SLOW) < cm.tree_time(1e9, 8, SLOW)


def test_step_times_and_speedup_by_hand():
    method = cm.Method(compute_time=1.0, sync_time=8.0, sync_rate=0.25, flag_time=0.5)
    assert method.step_time == 3.5  # 1 + 2 + 0.5
    assert method.overlapped_step_time == 2.5  # max(1, 2.5)
    synchronous = cm.Method(1.0, 6.0)
    assert cm.speedup(method, synchronous) == 2.0  # 7 / 3.5
    assert cm.speedup(method, synchronous, overlap=True) == 2.4  # 6 / 2.5


def test_a_step_is_never_faster_than_its_computation():
    for rate in (0.0, 0.1, 1.0):
        method = cm.Method(1.0, 0.3, rate, 0.1)
        assert method.compute_time <= method.overlapped_step_time <= method.step_time


def test_speedup_falls_with_the_sync_rate():
    synchronous = cm.Method(0.3, 2.0)
    gains = [cm.speedup(cm.Method(0.3, 2.0, s), synchronous) for s in (0, 0.01, 0.5, 1)]
    assert all(a > b for a, b in itertools.pairwise(gains))
    assert gains[-1] == 1.0


@pytest.mark.parametrize(
    "baseline_sync", [0.31, 1.0, 2.2], ids=["low", "middle", "high"]
)
@pytest.mark.parametrize("compute", [0.0, 0.298, 40.0])
def test_both_step_times_are_equal_at_the_break_even_rate(compute, baseline_sync):
    baseline = cm.Method(compute, baseline_sync)
    method = cm.Method(compute, sync_time=2.3, flag_time=0.3)
    even = cm.break_even(method, baseline)
    assert not even.never
    assert not even.always
    at_even = replace(method, sync_rate=even.sync_rate)
    assert at_even.step_time == pytest.approx(baseline.step_time, rel=EXACT)
    more = replace(method, sync_rate=even.sync_rate + 0.01)
    assert more.step_time > baseline.step_time


@pytest.mark.parametrize(
    ("baseline_sync", "sync", "flag", "text"),
    [
        (0.1, 1.0, 0.2, "never"),  # the flag alone costs more than the baseline's sync
        (0.6, 1.0, 0.2, "40.00%"),  # (0.6 - 0.2) / 1
        (0.2, 1.0, 0.2, "0.00%"),
        (1.5, 1.0, 0.25, "always"),  # 1.25
        (1.0, 1.0, 0.0, "always"),  # equal with a sync on every step
        (0.1, 0.0, 0.2, "never"),  # syncs take no time: only the flag counts
        (0.2, 0.0, 0.1, "always"),
        (0.0, 0.0, 0.0, "always"),
    ],
)
def test_break_even_is_reported_in_words(baseline_sync, sync, flag, text):
    method = cm.Method(compute_time=2.0, sync_time=sync, flag_time=flag)
    assert str(cm.break_even(method, cm.Method(2.0, baseline_sync))) == text


def test_break_even_against_factors_is_lower_than_against_gradients():
    size = small_model()
    link = cm.Link(1e3, 0.001)
    method = cm.Method(1.0, cm.ring_time(cm.reconcile_payload(size), 4, link))
    rates = [
        cm.break_even(method, cm.Method(1.0, cm.ring_time(payload, 4, link))).sync_rate
        for payload in (cm.factor_payload(size, 1), cm.gradient_payload(size))
    ]
    assert 0 < rates[0] < rates[1] < 1


def test_the_authors_model_has_the_byte_count_of_their_logs():
    assert cm.gradient_payload(_projections.AUTHORS_MODEL) == 648_806_400


def test_a_projection_by_hand():
    row = next(r for r in cm.published_projections() if r.name == "InfiniBand NDR")
    # T = 14 x 0.6 us + 1.75 x 648,806,400 x 8 bits / 400 Gb/s
    #   = 0.0084 ms + 22.708224 ms; flag = 6 x 0.6 us = 0.0036 ms
    # (298 + 22.716624) / (298 + 0.22716624 + 0.0036 + 6 x 32 bits / 400 Gb/s)
    expected = 320.716624 / (298.23076624 + 4.8e-7)
    assert row.ours == pytest.approx(expected, rel=EXACT)
    assert row.ours_overlapped == 1.0
    assert (row.comes_out, row.comes_out_overlapped) == (False, True)


@pytest.mark.parametrize(
    ("ours", "paper", "within"),
    [(1.04, 1.0, True), (0.96, 1.0, True), (1.06, 1.0, False), (0.94, 1.0, False)],
)
def test_within_five_percent(ours, paper, within):
    row = cm.Projection("link", SLOW, paper, ours, ours_overlapped=9.0)
    assert row.comes_out is within
    assert row.comes_out_overlapped is False
    assert replace(row, paper=None).comes_out is None


def test_every_input_is_varied_through_its_published_value():
    reference = {row.name: row.ours for row in cm.published_projections()}
    for row in cm.published_sensitivity():
        assert len(row.values) == len(row.fast) == len(row.slow) > 1
        assert reference["InfiniBand NDR"] in row.fast
        assert reference["regions, US east-west"] in row.slow


def test_the_document_has_the_tables_that_the_command_prints(capsys):
    runpy.run_module("curvadion_jax.cost_model", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed == f"{cm.projections_table()}\n\n{cm.sensitivity_table()}\n"
    blocks = DOCUMENT.read_text(encoding="utf-8").split("```text\n")[1:]
    tables = [block.split("```")[0] for block in blocks]
    assert tables == [f"{cm.projections_table()}\n", f"{cm.sensitivity_table()}\n"]
