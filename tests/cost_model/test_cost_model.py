"""The cost model: bytes, times and break-even, by hand."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from curvadion_jax import cost_model as cm
from curvadion_jax.compressors import Payload

EXACT = 1e-12
"""Relative: a handful of float64 operations, each good to 1.1e-16."""

SLOW = cm.Link(bandwidth=8e9, round_trip_time=0.1)


def tree(leaf=jax.ShapeDtypeStruct, **shapes):
    return {name: leaf(shape, jnp.float32) for name, shape in shapes.items()}


def small_model():
    """A 6 x 4 matrix, a stack of three 5 x 5 ones, and 10 elements: 109 in all."""
    return cm.model_size(tree(w=(4, 6), stack=(3, 5, 5), b=(10,)))


@pytest.mark.parametrize(
    ("replicas", "sent"),
    # 2 (N-1)/N x 8 bytes: 0, 8, 2 x 2/3 x 8 = 32/3, 12, 14
    [(1, 0.0), (2, 8.0), (3, 32 / 3), (4, 12.0), (8, 14.0)],
)
def test_bytes_of_an_all_reduce_by_hand(replicas, sent):
    assert cm.sync_bytes(8, replicas) == pytest.approx(sent, rel=EXACT)


def test_payloads_by_hand():
    size = small_model()
    # 24 + 75 + 10 elements
    assert (size.parameters, size.matrix_elements) == (109, 99)
    assert cm.gradient_payload(size) == 436
    # rank 1: (6 + 4) + 3 x (5 + 5) + 10 = 50 elements of 4 bytes
    assert cm.factor_payload(size, rank=1) == 200
    # parameters and 99 elements of momentum
    assert cm.reconcile_payload(size) == 4 * (109 + 99)
    assert cm.reconcile_payload(size, average_momentum=False) == 436


@pytest.mark.parametrize(
    ("shape", "rank", "elements"),
    # 6 x 4 at rank 2: 20 < 24, factors. At rank 3: 30 >= 24, whole.
    # 4 x 4 at rank 2: 16 = 16, whole either way.
    [((6, 4), 2, 20), ((6, 4), 3, 24), ((2, 4, 4), 2, 32)],
)
def test_a_matrix_is_sent_whole_where_factors_are_not_smaller(shape, rank, elements):
    assert cm.factor_payload(cm.model_size(tree(w=shape)), rank) == 4 * elements


@pytest.mark.parametrize(
    ("rank", "resolved"),
    [(1, 1), (4, 4), (9, 5), (1.0, 5), (0.5, 3), (0.01, 1)],
    ids=["one", "int", "clipped", "full", "rounded up", "at least one"],
)
@pytest.mark.parametrize("shape", [(70, 5), (5, 70)])
def test_rank_of_a_matrix_whose_smaller_side_is_5(rank, resolved, shape):
    # The factors of rank 5 are larger than the matrix.
    sent = cm.factor_payload(cm.model_size(tree(w=shape)), rank)
    assert sent == 4 * min(75 * resolved, 350)


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct, jnp.zeros])
def test_model_size_of_a_tree(leaf):
    params = {"w": leaf((3, 5, 5), jnp.float32), "b": [leaf((10,), jnp.float32)]}
    assert cm.model_size(params) == cm.ModelSize(85, ((3, 5, 5),))


def test_model_size_by_dimension_numbers():
    params = tree(w=(2, 3, 5), other=(4, 4))
    numbers = {"w": optax.contrib.MuonDimensionNumbers((0, 1), 2), "other": None}
    size = cm.model_size(params, dimension_numbers=numbers)
    assert size == cm.ModelSize(46, ((1, 6, 5),))


@pytest.mark.parametrize("count", [109, np.int64(109)], ids=["int", "numpy"])
def test_model_size_of_a_count(count):
    size = cm.model_size(count)
    assert size == cm.ModelSize(small_model().parameters)
    assert type(size.parameters) is int


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
    assert cm.sync_bytes(8, 4) == 12
    assert cm.sync_bytes(Payload(gathered=5), 4) == 15
    assert cm.sync_bytes(Payload(8, 5), 1) == 0
    mixed = cm.bytes_per_step(Payload(8, 5), 4, 0.5, flag=False)
    assert mixed == pytest.approx(13.5, rel=EXACT)


@pytest.mark.parametrize("gathered", [0, 30])
@pytest.mark.parametrize("replicas", [2, 5, 64])
def test_what_is_gathered_counts_as_half_of_n_times_what_is_averaged(
    replicas, gathered
):
    payload = Payload(cm.reconcile_payload(small_model()), gathered)
    averaged = payload.as_averaged(replicas)
    ours = cm.bytes_per_step(payload, replicas, 0.1)
    assert ours == pytest.approx(cm.bytes_per_step(averaged, replicas, 0.1), rel=EXACT)


@pytest.mark.parametrize("replicas", [2, 5, 64])
def test_the_share_of_averaged_bytes_is_that_of_payloads(replicas):
    size = small_model()
    ours = cm.bytes_per_step(cm.reconcile_payload(size), replicas, 0.1)
    whole = cm.bytes_per_step(cm.gradient_payload(size), replicas, flag=False)
    # 10% of 832 bytes, and the flag, of 436
    assert ours / whole == pytest.approx((83.2 + 4) / 436, rel=EXACT)


def test_times_by_hand():
    # 4 replicas, 50 ms one way, 1e9 bytes/s: 6 x 0.05 + 2 x 3/4 x 2e9/1e9 = 0.3 + 3
    assert cm.ring_time(2e9, 4, SLOW) == pytest.approx(3.3, rel=EXACT)
    # 3 x 0.05 + 3 x 1e9/1e9 for what is gathered, alone or after that
    gathered = Payload(gathered=10**9)
    assert cm.ring_time(gathered, 4, SLOW) == pytest.approx(3.15, rel=EXACT)
    both = gathered + Payload(averaged=2 * 10**9)
    assert cm.ring_time(both, 4, SLOW) == pytest.approx(3.3 + 3.15, rel=EXACT)


def test_a_flag_between_two_replicas_takes_one_round_trip():
    link = cm.Link(math.inf, 0.07)
    assert cm.flag_time(2, link) == pytest.approx(0.07, rel=EXACT)


def test_flags_by_hand():
    # 4 bytes at 1e9 bytes/s; up and down for 8 replicas is 6 x 0.05 s, 5 replicas too.
    whole = 6 * (0.05 + 4e-9)
    for replicas in (5, 8):
        assert cm.flag_time(replicas, SLOW) == pytest.approx(whole, rel=EXACT)
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
    rare = cm.bytes_per_step(436, 2, 0.1, ask_every=8)
    assert rare == pytest.approx(43.6 + 0.5, rel=EXACT)
    assert cm.bytes_per_step(400, 2, 0.03, flag=False, ask_every=8) == 12.0


@pytest.mark.parametrize(
    ("payload", "replicas"), [(1e9, 1), (0, 8)], ids=["one", "empty"]
)
def test_one_replica_or_no_payload_takes_no_time(payload, replicas):
    assert cm.ring_time(payload, replicas, SLOW) == 0.0


def increasing(values):
    return all(a < b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize(
    "time", [lambda n, link: cm.ring_time(1e6, n, link), cm.flag_time]
)
def test_times_grow_with_replicas_and_round_trip_and_fall_with_bandwidth(time):
    assert increasing(time(n, SLOW) for n in (1, 2, 4, 8, 16))
    assert increasing(time(8, replace(SLOW, round_trip_time=t)) for t in (0, 0.01, 1.0))
    assert increasing(time(8, replace(SLOW, bandwidth=b)) for b in (1e12, 1e9, 1e6))


def test_times_grow_with_the_payload():
    assert increasing(cm.ring_time(b, 8, SLOW) for b in (1, 10, 1e6, 1e9))


def test_the_tree_is_faster_for_the_flag():
    assert cm.flag_time(8, SLOW) < cm.ring_time(4, 8, SLOW)


def test_step_times_and_speedup_by_hand():
    method = cm.Method(compute_time=1.0, sync_time=8.0, sync_rate=0.25, flag_time=0.5)
    assert method.step_time == 3.5  # 1 + 2 + 0.5
    assert method.communication_share == 2.5 / 3.5
    assert method.overlapped_step_time == 2.5  # max(1, 2.5)
    synchronous = cm.Method(1.0, 6.0)
    assert cm.speedup(method, synchronous) == 2.0  # 7 / 3.5
    assert cm.speedup(method, synchronous, overlap=True) == 2.4  # 6 / 2.5


def test_a_step_that_takes_no_time_does_not_wait():
    assert cm.Method(0.0, 0.0).communication_share == 0.0


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
    assert 0 <= even < 1
    at_even = replace(method, sync_rate=even)
    assert at_even.step_time == pytest.approx(baseline.step_time, rel=EXACT)
    more = replace(method, sync_rate=even + 0.01)
    assert more.step_time > baseline.step_time


@pytest.mark.parametrize(
    ("baseline_sync", "sync", "flag", "rate"),
    [
        (0.1, 1.0, 0.2, -0.1),  # the flag alone costs more than the baseline's sync
        (0.6, 1.0, 0.2, 0.4),  # (0.6 - 0.2) / 1
        (0.2, 1.0, 0.2, 0.0),
        (1.5, 1.0, 0.25, 1.25),
        (1.0, 1.0, 0.0, 1.0),  # equal with a sync on every step
        (0.1, 0.0, 0.2, -math.inf),  # syncs take no time: only the flag counts
        (0.2, 0.0, 0.1, math.inf),
        (0.0, 0.0, 0.0, math.inf),
    ],
)
def test_break_even_never_sometimes_and_always(baseline_sync, sync, flag, rate):
    method = cm.Method(compute_time=2.0, sync_time=sync, flag_time=flag)
    even = cm.break_even(method, cm.Method(2.0, baseline_sync))
    # Differences of numbers near 2.
    assert even == pytest.approx(rate, rel=EXACT, abs=1e-15)


def test_break_even_against_factors_is_lower_than_against_gradients():
    size = small_model()
    link = cm.Link(1e3, 0.001)
    method = cm.Method(1.0, cm.ring_time(cm.reconcile_payload(size), 4, link))
    rates = [
        cm.break_even(method, cm.Method(1.0, cm.ring_time(payload, 4, link)))
        for payload in (cm.factor_payload(size, 1), cm.gradient_payload(size))
    ]
    assert 0 < rates[0] < rates[1] < 1
