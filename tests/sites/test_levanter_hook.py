"""The hook of Levanter's port in a loop like Levanter's, and how such runs have failed.

The faults are those that Marin found with elastic training on preemptible slices
(marin-community/marin, issue 3521). Nothing here needs Levanter.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from faulty import FaultyStore
from obstore.store import MemoryStore

from curvadion_jax import sites
from curvadion_jax.sites import _heart, _site, _store, _worker

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "ports" / "levanter"))

import site_hook

EVERY, NEVER = 2, 10**6
TX = optax.adam(0.05)


class Model(eqx.Module):
    """With all that a model may hold and a site must not send."""

    kernel: jax.Array
    bias: jax.Array | None
    seen: jax.Array
    activation: Callable[..., Any]


class State(eqx.Module):
    """What Levanter's `TrainerState` has of it."""

    step: jax.Array
    model: Model
    opt_state: Any

    @property
    def trainable_model(self) -> Model:
        return eqx.filter(self.model, eqx.is_inexact_array)


@dataclasses.dataclass
class StepInfo:
    """Levanter's, whose `state` a hook may replace."""

    state: State
    step = property(lambda self: int(self.state.step) - 1)


def new_state() -> State:
    kernel = jax.random.normal(jax.random.key(0), (4, 3))
    model = Model(kernel, None, jnp.array(0), jax.nn.relu)
    return State(jnp.array(0), model, TX.init(eqx.filter(model, eqx.is_inexact_array)))


@eqx.filter_jit(donate="all-except-first")
def train_step(number, state):
    """As Levanter's: the state before it is donated."""
    target = jax.random.normal(jax.random.fold_in(jax.random.key(number), state.step))
    loss = lambda model: jnp.sum((model.kernel - target) ** 2)
    grads = eqx.filter_grad(loss)(state.model)
    trained = state.trainable_model
    updates, opt_state = TX.update(grads, state.opt_state, trained)
    model = eqx.apply_updates(state.model, updates)
    model = eqx.tree_at(lambda x: x.seen, model, model.seen + 1)
    return State(state.step + 1, model, opt_state)


class Trainer:
    """Levanter's loop. The site's thread does nothing until a test says so."""

    def __init__(self, store, name, state=None, hooks=(), **options):
        options = {"every": EVERY, "max_lag": NEVER, "grace": 0.0} | options
        self.site = sites.Site(store, name, **options)
        self.logged = {}
        log = lambda metrics, *, step: self.logged.update({step: metrics})
        hook = site_hook.SiteHook(self.site, lambda step: 1.0, log)
        self.hooks = [hook, *hooks]
        self.number = ord(name[0])
        self.info = StepInfo(hook.start(new_state() if state is None else state))

    def steps(self, count):
        for _ in range(count):
            self.info = StepInfo(train_step(self.number, self.info.state))
            for hook in self.hooks:
                hook(self.info)

    def end(self):
        for hook in self.hooks:
            hook(self.info, force=True)

    def turn(self):
        """What the site's thread does between two looks."""
        self.site._worker._turn()

    def round(self):
        """A round of this site alone, or the end of one that others have begun."""
        self.steps(EVERY)
        self.turn()
        self.steps(1)  # in which it hears what has become of it

    @property
    def follower(self):
        return self.site._worker.follower

    @property
    def kernel(self):
        return np.asarray(self.info.state.model.kernel)

    @property
    def outer(self):
        return self.follower.outer.anchor[0]


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """A wait does what a thread would, and nothing is left for the end of Python."""
    monkeypatch.setattr(_worker.Worker, "start", lambda _: None)
    monkeypatch.setattr(_worker.Worker, "wait", lambda self, _: self._turn())
    monkeypatch.setattr(_site.atexit, "register", lambda _: None)


@pytest.fixture
def store():
    return MemoryStore()


def paths(store, part):
    return sorted(x["path"] for page in store.list() for x in page if part in x["path"])


def header(store, path):
    return json.loads(bytes(store.get(path).bytes()))


def commits(store):
    return [header(store, path) for path in paths(store, "commits/")]


def counted(store):
    """Who counted in each round."""
    return [[x["name"] for x in each["contributors"]] for each in commits(store)]


def uids(store):
    return [x["uid"] for each in commits(store) for x in each["contributors"]]


# What the hook does.


def test_a_site_s_state_differs_from_the_loop_s_by_the_parameters_alone(store):
    """Of a state that a checkpoint has restored, too."""
    a = Trainer(store, "a")
    a.round()
    before = train_step(1, train_step(1, new_state()))
    kept = jax.tree.map(np.asarray, (before.step, before.opt_state, before.model.seen))
    b = Trainer(store, "b", before)
    np.testing.assert_array_equal(b.kernel, a.outer)
    found = b.info.state
    own = found.step, found.opt_state, found.model.seen
    jax.tree.map(np.testing.assert_array_equal, own, kept)
    assert found.model.activation is jax.nn.relu
    assert found.model.bias is None


def test_the_hooks_after_it_see_what_training_continues_with_and_the_run_s_model(store):
    saved = []
    save = lambda info, force=False: saved.append(np.array(info.state.model.kernel))
    a = Trainer(store, "a", hooks=[save])
    for _ in range(3):
        a.round()
        np.testing.assert_array_equal(saved[-1], a.kernel)
    a.end()
    assert len(saved) == 3 * (EVERY + 1) + 1
    np.testing.assert_array_equal(saved[-1], a.outer)
    assert a.site.metrics.counted == a.site.metrics.contributions > 3


def test_what_a_site_has_done_is_logged_at_each_step(store):
    a = Trainer(store, "a")
    a.round()
    a.round()
    assert sorted(a.logged) == [*range(2 * (EVERY + 1))]
    last = a.logged[a.info.step]
    assert last == {f"site/{x}": y for x, y in a.site.metrics._asdict().items()}
    assert last["site/counted"] == 2


@pytest.mark.parametrize(
    ("bits", "momentum", "sent", "state"),
    [(2, 0.4, "uint8", 1), (None, 0, "float32", 0)],
)
def test_a_config_makes_the_site(tmp_path, bits, momentum, sent, state):
    """A contribution in bits or float32; a momentum of the outer step, or none."""
    config = site_hook.SiteConfig(
        str(tmp_path), "oslo", every=3, bits=bits, outer_momentum=momentum
    )
    site = config.site()
    hook = site_hook.SiteHook(site, lambda step: 1.0)
    hook.start(new_state())
    model = site._worker.follower.model
    assert {str(x.dtype) for x in model.message} == {sent}
    assert len(model.outer_step.snapshot) - 1 == state
    assert (site.name, site._every, site._grace) == ("oslo", 3, config.grace)


# 1. Arrays in the payload that were none.


def test_only_what_is_trained_is_sent(store):
    a = Trainer(store, "a")
    a.round()
    assert header(store, "run.json")["model"] == [[".kernel", "float32", [4, 3]]]
    assert a.info.state.model.seen == EVERY + 1  # it is the site's own


@pytest.mark.parametrize("field", ["activation", "seen"])
def test_what_is_no_array_is_refused_before_anything_is_written(store, field):
    model = new_state().model
    others = {"activation": None, "seen": None, field: getattr(model, field)}
    model = Model(model.kernel, None, **others)
    with pytest.raises(TypeError, match=rf"^\.{field} is .* Give the parameters alone"):
        sites.Site(store, "a").start(model)
    assert paths(store, "") == []


def test_an_array_that_becomes_none_ends_training_and_not_the_run(store):
    a, b = Trainer(store, "a"), Trainer(store, "b")
    a.steps(EVERY - 1)
    lost = eqx.tree_at(lambda x: x.model.kernel, a.info.state, None)
    with pytest.raises(ValueError, match="None"):
        a.hooks[0](StepInfo(lost))
    b.round()
    assert counted(store) == [["b"]]


# 2. Requests and commits that vanished from the bucket.


class Losing(FaultyStore):
    """Loses an object as soon as it is written, once."""

    def __init__(self, store, part):
        super().__init__(store)
        self.part = part

    def put(self, key, data, **options):
        super().put(key, data, **options)
        if self.part and self.part in key:
            self.part = ""
            self.delete(key)


@pytest.mark.parametrize("kind", ["rounds/", "bodies/rounds/", "members/"])
def test_what_vanishes_before_it_is_read_is_written_again(store, kind):
    losing = Losing(store, "")
    a, b = Trainer(store, "a", quorum=2), Trainer(losing, "b", quorum=2)
    for each in (a, b):
        each.steps(EVERY)
    if kind == "members/":
        store.delete(paths(store, "members/b/")[0])
    else:
        losing.part = f"{kind}00000000/b"
        b.turn()
        a.turn()
        assert losing.part == ""
    b.turn()
    a.turn()
    b.turn()
    assert counted(store) == [["a", "b"]]
    assert len(paths(store, "members/b/")) == 1
    np.testing.assert_array_equal(a.outer, b.outer)


def test_what_counts_and_vanishes_before_all_have_read_it_costs_them_ten_rounds(store):
    """They say so, keep training, and lose none of their own steps."""
    a, b = Trainer(store, "a"), Trainer(store, "b")
    b.round()
    for path in paths(store, "rounds/00000000/b"):
        store.delete(path)
    a.steps(EVERY)
    with pytest.raises(_store.StoreError, match="no later snapshot can be used"):
        a.turn()
    while len(commits(store)) < 11:  # it writes one before the eleventh
        b.round()
    a.turn()
    (entry,) = commits(store)[-1]["contributors"]
    assert (entry["name"], entry["tokens"]) == ("a", EVERY)
    assert b.follower.advance()
    np.testing.assert_array_equal(a.outer, b.outer)


def test_a_commit_that_vanishes_is_decided_again_and_alike(store):
    a, b = (Trainer(store, name, quorum=2) for name in "ab")
    for each in (a, b):
        each.steps(EVERY)
    b.turn()
    a.turn()
    (before,) = commits(store)
    store.delete("commits/00000000.json")
    b.turn()
    (after,) = commits(store)
    assert after == before
    np.testing.assert_array_equal(a.outer, b.outer)
    for each in (b, a):
        each.round()
    assert counted(store) == [["a", "b"]] * 2
    assert len(set(uids(store))) == 4


# 3. Donated buffers that were served to a peer.


def test_what_a_site_sends_is_of_its_sync_although_training_donates_it(store):
    """The thread reads it steps later."""
    a, b = Trainer(store, "a"), Trainer(store, "b")
    a.steps(EVERY)
    sent = a.kernel.copy()
    held = a.info.state.model.kernel
    a.steps(5)
    assert held.is_deleted()
    a.turn()
    b.turn()
    np.testing.assert_array_equal(b.outer, sent)
    # And what it lands on is its own: peers read the outer parameters meanwhile.
    a.steps(1)
    landed = a.outer.copy()
    a.steps(5)
    np.testing.assert_array_equal(a.outer, landed)
    np.testing.assert_array_equal(b.outer, landed)


# 4. Stale requests of peers that were gone.


def test_a_peer_that_is_gone_counts_once_and_is_waited_for_until_it_is_silent(store):
    a, b = (Trainer(store, name, grace=1e9) for name in "ab")
    b.steps(EVERY)
    b.follower.prepare([b.kernel], b.follower.outer.params, 2.0)
    b.follower.send()  # its last sign of life
    a.round()
    assert counted(store) == [["a", "b"]]
    a.round()
    assert len(commits(store)) == 1  # b may be alive: nobody has looked
    for _ in range(_heart._LOOKS):
        a.follower.heart.beat()
    a.turn()
    a.steps(1)
    a.round()
    assert counted(store) == [["a", "b"], ["a"], ["a"]]
    assert len(set(uids(store))) == len(uids(store))


@pytest.mark.parametrize("copied", [False, True])
def test_a_contribution_of_a_round_that_is_over_counts_in_no_other(store, copied):
    """Neither where it arrives late, nor copied to where an open round is read."""
    a, b = Trainer(store, "a"), Trainer(store, "b")
    b.steps(EVERY)
    b.follower.prepare([b.kernel], b.follower.outer.params, 2.0)
    a.round()
    b.follower.send()  # to the round that is over
    late = paths(store, "rounds/00000000/b")
    assert len(late) == 2
    for path in late if copied else []:
        there = path.replace("00000000", "00000001", 1)
        store.put(there, bytes(store.get(path).bytes()))
    a.round()
    assert counted(store) == [["a"], ["a"]]


# 5. Recoveries of 80 seconds to 7 minutes.


class Counting(FaultyStore):
    """Counts reads of arrays."""

    def __init__(self, store):
        super().__init__(store)
        self.bodies = 0

    def get(self, key):
        self.bodies += key.startswith("bodies/")
        return super().get(key)


def test_a_site_that_was_killed_reads_a_snapshot_and_counts_in_the_next_round(store):
    a, b = Trainer(store, "a"), Trainer(store, "b")
    for number in range(25):
        if number < 3:
            b.steps(EVERY)
            b.turn()
        a.round()
    assert counted(store)[-1] == ["a"]
    reads = Counting(store)
    again = Trainer(reads, "b", b.info.state)  # b's own checkpoint
    np.testing.assert_array_equal(again.outer, a.outer)
    # A snapshot, and at most ten rounds of one site.
    assert reads.bodies <= 1 + again.follower.snapshot_every
    assert again.info.state.step == 3 * EVERY
    again.round()
    assert counted(store)[-1] == ["b"]
    assert (again.site.metrics.counted, again.site.metrics.missed) == (1, 0)


# 6. Two slices finished 2,000 steps, and every sync had failed.


def late_to_each_round(a, b, rounds):
    """The others commit each round while the contribution of `a` is under way."""
    for _ in range(rounds):
        a.steps(EVERY)
        b.round()
        while a.follower.advance():
            pass
        a.steps(1)


def test_a_run_whose_syncs_all_fail_ends_with_an_error_and_saves_no_model(
    store, caplog, monkeypatch
):
    saved = []
    save = lambda info, force=False: saved.append(force)
    a, b = Trainer(store, "a", hooks=[save]), Trainer(store, "b")
    late_to_each_round(a, b, 9)
    assert a.logged[a.info.step]["site/missed"] == 9
    assert a.logged[a.info.step]["site/counted"] == 0
    warned = [
        x.getMessage() for x in caplog.records if "trains alone" in x.getMessage()
    ]
    assert [x.split()[4] for x in warned] == ["4", "8"]
    leave = a.site.leave
    monkeypatch.setattr(a.site, "leave", lambda params: leave(params, timeout=0))
    with pytest.raises(RuntimeError, match=r"None of the \d+ contributions of this"):
        a.end()
    assert True not in saved


def test_a_bucket_that_is_away_for_the_whole_run_ends_it_with_an_error(store):
    faulty = FaultyStore(store)
    a = Trainer(faulty, "a")
    faulty.cut_off = True
    a.steps(10 * EVERY)
    with pytest.raises(_store.StoreError):
        a.turn()
    assert a.site.metrics.contributions == 1 > a.site.metrics.counted
    a.site._worker.wait = lambda _: None
    with pytest.raises(RuntimeError, match="None of the 1 contributions of this site"):
        a.site.leave(a.info.state.trainable_model, timeout=0)
