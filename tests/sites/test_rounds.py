"""Which contributions count in a round, how much, and when the round is over."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from obstore.store import MemoryStore
from site_steps import PARAMS, ByHand, settle

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _follower, _run, _store

# Parameters here are small whole numbers, and so are most of their moves.
ROUNDING = 1e-5
GRACE, MINUTE = 30.0, 60.0


def named(names, **options):
    store = MemoryStore()
    return [ByHand(store, name, **options) for name in names]


def test_contributions_that_cannot_count_make_no_quorum():
    a, b, c = named("abc", quorum=3)
    a.send(4.0)
    b.send(float("nan"))
    # Objects of strangers are not even read.
    for name in ("Thumbs.db", ".nfs0001", "stranger"):
        a.store.create(_run.contribution_key(0, name), b"junk")
    assert not a.follower.propose()
    c.send(float("nan"))
    settle(a, b, c)
    assert a.moved() == 0
    assert [a.outcomes, b.outcomes] == [["late"], ["It contains NaN or Inf."]]
    # The round is over, so all can contribute again.
    settle(a, b, c, by=[3.0, 3.0, 3.0])
    assert a.moved() == pytest.approx(3.0)


def test_anchor_and_residuals_add_up_to_all_contributions():
    form = compressors.quantize(2, block=4)
    a, b = named("ab", compressor=form, quorum=2)
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
    a.follower._quorum = 1
    a.step()
    b.send(1.0)
    b.follow()
    assert b.outcomes[-1] == "late"  # and nothing of its residual is lost
    assert b.follower._residual is before


def test_two_sites_propose_and_one_commit_is_followed():
    a, b, c = named("abc", quorum=2)
    a.send(2.0)
    b.send(4.0)
    assert a.follower.propose()
    c.send(9.0)
    assert b.follower.propose()  # with all three
    for site in (a, b, c):
        site.follow()
    assert a.digest == b.digest == c.digest
    assert a.moved() == pytest.approx(3.0)
    assert c.outcomes == ["late"]


def test_an_absent_site_has_a_share_for_a_few_rounds():
    a, b = named("ab", quorum=1)
    settle(a, b, by=[1.0, 1.0])
    moved = [a.moved()]
    for _ in range(_run.FORGET + 1):
        a.step()
        moved.append(a.moved())
    halves, whole = np.diff(moved)[:-1], np.diff(moved)[-1]
    np.testing.assert_allclose(halves, 0.5, atol=ROUNDING)
    assert whole == pytest.approx(1.0, abs=ROUNDING)


def test_a_site_that_left_is_neither_waited_for_nor_expected():
    a, b = named("ab", quorum=2, grace=1e9)
    settle(a, b, by=[1.0, 1.0])
    _run.leave(b.store, "b", 1, b.follower.has_contributed)
    a.step()
    assert a.moved() == pytest.approx(2.0)


def test_a_site_that_never_contributed_does_not_stand_for_one_to_come():
    """Such as an evaluation, which takes the run's model and leaves."""
    store = MemoryStore()
    a = ByHand(store, "a", quorum=2)
    with sites.Site(store, "b", quorum=2) as b:
        b.leave(b.start(PARAMS))
    assert not a.store.keys("members/b/")
    a.send(1.0)
    assert not a.follower.propose()


def test_a_contribution_whose_answer_is_lost_is_one(monkeypatch):
    """Else the others would wait for the site for ever, once it has left."""
    a, b = named("ab", quorum=2, grace=1e9)
    write = b.store.write

    def lose_the_answer(*arguments):
        write(*arguments)
        raise _store.StoreError("The answer is lost.")

    monkeypatch.setattr(b.store, "write", lose_the_answer)
    with pytest.raises(_store.StoreError):
        b.send(1.0)
    a.send(1.0)
    a.commit()
    _run.leave(b.store, "b", 1, b.follower.has_contributed)
    a.step()
    assert a.moved() == pytest.approx(2.0)


def test_a_listing_that_lacks_a_site_does_not_lower_the_quorum():
    a, b, c = named("abc", quorum=2)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    _run.leave(c.store, "c", 1, c.follower.has_contributed)
    b.store.delete(b.store.keys("members/b/"))
    a.send(1.0)
    assert not a.follower.propose()


@pytest.mark.parametrize(("by", "moved"), [(1.0, 2.0), (float("nan"), 3.0)])
def test_a_killed_predecessors_contribution_stands(by, moved):
    store = MemoryStore()
    ByHand(store, "a").send(by)
    again, b = ByHand(store, "a"), ByHand(store, "b")
    again.send(5.0)
    b.send(3.0)
    settle(b, again)
    assert again.outcomes == ["late"]  # a predecessor's fault is not its own
    assert again.moved() == moved


def test_a_site_whose_outer_parameters_differ_stops_and_the_others_do_not():
    a, b, other = named("abc", quorum=2)
    outer = other.follower.outer
    other.follower.outer = outer._replace(digest="0" * 32)
    for site in (a, b, other):
        site.send(1.0)
    with pytest.raises(RuntimeError, match="Give all sites the same outer"):
        other.follower.propose()
    settle(a, b)
    assert [entry["name"] for entry in a.commit_of(0)["rejected"]] == ["c"]
    with pytest.raises(RuntimeError, match="have the digest"):
        other.follow()


def test_an_outer_step_that_is_not_finite_changes_nothing(caplog):
    params = {"scalar": jnp.ones([])}
    (a,) = named("a", outer=optax.scale(float("inf")), params=params)
    a.step(1.0)
    assert a.anchor == [1.0]
    assert "The outer step contains NaN or Inf" in caplog.text


def test_a_contribution_whose_answer_was_lost_counts_once(monkeypatch):
    a, b = named("ab", quorum=2)
    create = a.store.create

    def loses_its_answer(key, data):
        create(key, data)
        raise _store.StoreError("connection reset")

    a.prepare(1.0)
    monkeypatch.setattr(a.store, "create", loses_its_answer)
    with pytest.raises(OSError, match="reset"):
        a.follower.send()
    monkeypatch.undo()
    b.send(1.0)
    settle(b, a)
    assert a.outcomes == [""]
    a.follower.send()
    assert a.moved() == b.moved() == 1.0


def test_a_site_that_was_away_may_have_gone_far_but_not_in_one_round():
    a, b, c = named("abc", quorum=2)
    for number in range(13):
        for site in (a, b):
            site.send(1.0)
        if number >= 11:
            c.send(12.0)
        settle(a, b, c)
    assert c.outcomes[0] == ""
    assert c.outcomes[1].startswith("Its norm per round")


def test_a_site_that_trained_while_the_others_were_away_may_have_gone_far():
    a, b, c = named("abc", quorum=3)
    for site, steps in ((a, 1), (b, 1), (c, 20)):
        site.send(1.0 * steps, tokens=steps)
    settle(a, b, c)
    assert c.outcomes == [""]


def test_messages_beyond_a_models_size_are_read_again_for_the_same_step(monkeypatch):
    outer = optax.sgd(1.0, momentum=0.5)
    plain = named("abcd", quorum=4, outer=outer)
    settle(*plain, by=[1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(_follower, "_KEPT", 0)
    sites = named("abcd", quorum=4, outer=outer)
    for site, by in zip(sites, [1.0, 2.0, 3.0, 4.0], strict=True):
        site.send(by)
    a, before = sites[0], sites[0].store.down
    assert a.follower.propose()
    kept = {name for name, x in a.follower._received.items() if x.arrays}
    assert kept == {"a"}  # its own, which it has anyway
    looked = a.store.down - before
    a.advance()
    size = a.follower.model.nbytes
    assert looked > 4 * size
    assert a.store.down - before - looked > 2 * size
    assert a.digest == plain[0].digest


@pytest.mark.parametrize("jump", [1e3, 1e15])
def test_a_jump_in_tokens_takes_a_bounded_share_and_is_logged_once(caplog, jump):
    """Its share counts as at most 1,000 times the median."""
    sites = named("abcd", quorum=4)
    settle(*sites, by=[1.0] * 4)
    assert not caplog.records
    for _ in range(2):
        for site in sites:
            site.send(1.0, tokens=jump if site.name == "d" else 1.0)
        settle(*sites)
    weights = {x["name"]: x["weight"] for x in sites[0].commit_of(1)["contributors"]}
    assert weights["d"] / weights["a"] == pytest.approx(1000)
    lines = {record.getMessage() for record in caplog.records}
    assert lines == {"round 1: 'd' has 99.7% of the weight. Compare the sites' tokens."}
    assert len(caplog.records) == len(sites)  # each logs it once


def test_a_share_of_one_among_two_is_not_bounded(caplog):
    a, b = named("ab", quorum=2)
    a.send(0.0)
    b.send(1.0, tokens=1e6)
    settle(a, b)
    assert a.moved() == pytest.approx(1.0, abs=ROUNDING)
    assert not caplog.records


def test_a_slow_site_is_waited_for_until_grace_is_over(clock):
    sites = a, b, c = named("abc", grace=GRACE, quorum=2)
    settle(a, b, c, by=[1.0, 1.0, 1.0])

    def later(seconds):
        clock.now += seconds
        for site in sites:  # all are alive
            site.follower.heart.beat()

    for number in (1, 2):  # each round has a window of its own
        a.send(1.0)
        later(10 * GRACE)  # which begins once the quorum is there
        assert not a.follower.propose()
        b.send(1.0)
        assert not a.follower.propose()
        later(GRACE - 1)
        assert not a.follower.propose()
        assert not a.advance()
        later(1)
        settle(a, b)
        assert [x["name"] for x in a.commit_of(number)["contributors"]] == ["a", "b"]


# Eighths of a grace in a round, and in which of them the third site dies.
@pytest.mark.parametrize(
    ("length", "dies"),
    [(1, 0), (1, 3), (3, 0), (3, 5), (8, 6), (8, 9), (40, 0), (40, 10)],
)
def test_a_death_delays_the_others_by_at_most_one_grace_in_all(clock, length, dies):
    a, b, c = named("abc", grace=GRACE, quorum=2)
    settle(a, b, c, by=[1.0, 1.0, 1.0])
    waited, begun = 0, 0
    for now in range(100):
        clock.now += GRACE / 8
        if now % 2 == 0:  # a site looks four times in a grace
            for site in (a, b, c)[: 3 if now <= dies else 2]:
                site.follower.heart.beat()
        if now < begun + length:
            continue
        for site in (a, b):
            if site.follower.contribution is None:
                site.send(1.0)
        if now <= dies and c.follower.contribution is None:
            c.send(1.0)
        if a.follower.propose():
            a.follow()
            b.follow()
            c.follow()
            begun = now
        else:
            waited += 1
    assert a.follower.number > 100 // length - 10
    # Who dies long before the others contribute is not waited for.
    assert waited == 0 if length == 40 else waited <= 8


@pytest.mark.parametrize("case", ["quorum", "grace", "listing"])
def test_the_log_says_once_a_minute_whom_a_round_waits_for(
    clock, caplog, monkeypatch, case
):
    """Also within a long grace, and if the site's own message is never listed."""
    sites = named("abc", quorum=1 if case == "grace" else 3, grace=1e6)
    a = sites[0]
    if case == "grace":  # all are awaited
        settle(*sites, by=[1.0, 1.0, 1.0])
    a.send(1.0)
    if case == "listing":
        listed = a.store.keys

        def hidden(prefix):
            return [] if prefix.startswith("rounds") else listed(prefix)

        monkeypatch.setattr(a.store, "keys", hidden)

    def lines_after(seconds: float) -> list[str]:
        clock.now += seconds
        caplog.clear()
        a.follower.send()
        assert not a.follower.propose()
        return [record.getMessage() for record in caplog.records]

    assert lines_after(0) == lines_after(MINUTE) == []
    (line,) = lines_after(1)
    ending = "0 of the contributions it needs; missing: a, b, c"
    if case != "listing":
        ending = "1 of the contributions it needs; missing: b, c"
    assert line.endswith(f"has {ending}")
    assert lines_after(MINUTE) == []
    assert lines_after(1) == [line]
