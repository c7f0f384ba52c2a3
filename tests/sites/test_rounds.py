"""Who counts in a round, and how much; what becomes of who does not."""

import jax.numpy as jnp
import numpy as np
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax import compressors
from curvadion_jax.sites import _rounds, _run
from curvadion_jax.sites._store import RunError

# The parameters here are small whole numbers, and so are most of their moves.
ROUNDING = 1e-5


def named(names, store=None, **options):
    store = store or MemoryStore()
    return [ByHand(store, name, **options) for name in names]


def test_sites_count_by_their_tokens():
    a, b = named("ab", quorum=2)
    a.send(4.0, tokens=300)
    b.send(8.0, tokens=100)
    settle(a, b)
    assert a.moved() == pytest.approx(0.75 * 4 + 0.25 * 8, abs=ROUNDING)
    assert a.outcomes == b.outcomes == [""]


def test_below_the_quorum_nothing_is_committed():
    a, b = named("ab", quorum=2)
    a.send(4.0)
    assert not a.follower.propose()
    assert not a.follower.advance()
    assert not b.follower.propose()  # nor by who has not contributed


def test_contributions_that_cannot_count_make_no_quorum():
    a, b, c = named("abc", quorum=3)
    a.send(4.0)
    b.send(float("nan"))
    # What lies there of others is not even read.
    for name in ("Thumbs.db", ".nfs0001", "stranger"):
        a.store.create(_rounds.contribution_key(0, name), b"junk")
    assert not a.follower.propose()
    c.send(float("nan"))
    settle(a, b, c)
    assert a.moved() == 0
    assert [a.outcomes, b.outcomes] == [["late"], ["it is not finite"]]
    # The round is over, so all can contribute again.
    for site in (a, b, c):
        site.send(3.0)
    settle(a, b, c)
    assert a.moved() == pytest.approx(3.0)


def test_who_is_late_keeps_its_drift_and_its_share():
    """One of two comes every second time, with twice as much."""
    a, b = named("ab")
    a.send(1.0)
    b.send(1.0)
    settle(a, b)
    a.step()
    b.send(1.0)  # to the round that is over
    b.follow()
    assert b.outcomes == ["", "late"]
    a.send(1.0)
    b.send(2.0, tokens=2)
    settle(a, b)
    assert a.moved() == pytest.approx(1 + 0.5 * 1 + 0.5 * (1 + 2), abs=ROUNDING)


def test_nothing_is_lost_of_the_residual():
    """Anchor and residuals add up to all contributions; who is late keeps its own."""
    form = compressors.quantize(2, block=4)
    a, b = named("ab", compressor=form)
    drifts, rng = np.zeros((2, 3)), np.random.default_rng(0)
    for _ in range(5):
        for site in (a, b):
            by = rng.normal()
            drifts += by / 2
            site.send(by)
        settle(a, b)
    residual = sum(site.follower._residual[0] for site in (a, b)) / 2
    found = a.anchor[0] - np.asarray(PARAMS["a"]) + residual
    np.testing.assert_allclose(found, drifts, atol=ROUNDING)
    before = b.follower._residual
    assert before[0].any()
    a.step()
    b.send(1.0)
    b.follow()
    assert b.outcomes[-1] == "late"
    assert b.follower._residual is before


def test_two_propose_and_one_is_followed():
    a, b = named("ab", quorum=2)
    a.send(2.0)
    b.send(4.0)
    assert a.follower.propose()
    assert b.follower.propose()
    a.follow()
    b.follow()
    assert a.commit_of(0)["by"] == "a"
    assert a.digest == b.digest
    assert a.moved() == pytest.approx(3.0)


def test_who_has_not_come_for_long_is_not_expected():
    a, b = named("ab")
    a.send(1.0)
    b.send(1.0)
    settle(a, b)
    moved = [a.moved()]
    for _ in range(_rounds.FORGET + 1):
        a.step()
        moved.append(a.moved())
    halves, whole = np.diff(moved)[:-1], np.diff(moved)[-1]
    np.testing.assert_allclose(halves, 0.5, atol=ROUNDING)
    assert whole == pytest.approx(1.0, abs=ROUNDING)


def test_one_that_left_is_neither_waited_for_nor_expected():
    a, b = named("ab", quorum=2, grace=1e9)
    a.send(1.0)
    b.send(1.0)
    settle(a, b)
    _run.leave(b.store, "b", 1)
    a.step()
    assert a.moved() == pytest.approx(2.0)


def test_a_killed_predecessors_contribution_stands():
    store = MemoryStore()
    ByHand(store, "a").send(1.0)
    again = ByHand(store, "a")
    again.step(5.0)
    assert again.outcomes == ["late"]
    assert again.moved() == 1.0


def test_the_older_of_two_sites_of_one_name_stops():
    first, _ = named("aa")
    first.send(1.0)
    with pytest.raises(RunError, match="nother site has joined the run as 'a'"):
        first.follower.propose()


def test_a_site_whose_outer_parameters_differ_stops_and_the_others_do_not():
    a, b, other = named("abc", quorum=2)
    outer = other.follower.outer
    other.follower.outer = outer._replace(digest="0" * 32)
    for site in (a, b, other):
        site.send(1.0)
    with pytest.raises(RunError, match="Give all sites the same outer optimizer"):
        other.follower.propose()
    settle(a, b)
    assert [entry["name"] for entry in a.commit_of(0)["rejected"]] == ["c"]
    with pytest.raises(RunError, match="have the digest"):
        other.follow()


def test_params_in_bfloat16_move_in_float32():
    params = {k: x.astype(jnp.bfloat16) for k, x in PARAMS.items()}
    a, b = named("ab", params=params, quorum=2)
    a.send(2.0)
    b.send(1.0)
    settle(a, b)
    assert a.anchor[0].dtype == jnp.bfloat16
    assert np.float32(a.anchor[0])[0, 0] == 1.5


class LosesAnswers:
    """A store that does what it is told, and then breaks off, once."""

    def __init__(self, store):
        self._store, self.lost = store, False
        self.get, self.list, self.delete = store.get, store.list, store.delete

    def put(self, key, data, **options):
        self._store.put(key, data, **options)
        if key.startswith("rounds/") and not self.lost:
            self.lost = True
            raise GenericError("connection reset")


def test_a_contribution_whose_answer_was_lost_counts_once():
    store = MemoryStore()
    a, b = ByHand(LosesAnswers(store), "a"), ByHand(store, "b")
    a.prepare(1.0)
    with pytest.raises(OSError, match="connection reset"):
        a.follower.send()
    b.send(1.0)
    settle(b, a)
    assert a.outcomes == [""]
    a.follower.send()
    assert a.moved() == b.moved() == 1.0
