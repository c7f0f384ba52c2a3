"""One site's copy of a run: it follows the commits, brings posts and proposes rounds.

Every method may fail with `StoreError` at any request, and is then called again: state
changes last, and what was written already is found there.
"""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from curvadion_jax.sites import _messages, _rounds, _run
from curvadion_jax.sites._messages import Refused
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._rounds import Post
from curvadion_jax.sites._run import RunError
from curvadion_jax.sites._store import Store

log = logging.getLogger("curvadion_jax.sites")

# Seconds for which a round may wait before the log says so.
_PATIENCE = 60


class Own(NamedTuple):
    """What this site brings to a round.

    Attributes:
      fragment: of the parameters.
      captured: the fragment's parameters when it was due.
      anchor: the fragment's anchor then, of which the site knew.
      drift: how far they were from it.
      message, left: what stands for it, and what is owed when that is counted.
      tokens: seen since the last contribution to the fragment.
      uid: of the message.
      round: to which it is posted, or may be: an answer may be lost; -1 before.
      posted: whether it is there.
    """

    fragment: int
    captured: Arrays
    anchor: Arrays
    drift: Arrays
    message: Arrays
    left: Arrays
    tokens: float
    uid: str
    round: int = -1
    posted: bool = False


class Follower:
    """See the module.

    Attributes:
      number: of the next round.
      outer: the outer side after the last one.
      own: what is brought to a round that is not committed yet, or None.
      settled: called with what was brought and "" if it was counted, "late" if it came
        too late, else why it was rejected.
      contributors: names in the last commit.
      snapshot_due: whether this site is to write the outer side in full.
    """

    def __init__(
        self,
        store: Store,
        model: Model,
        name: str,
        incarnation: int,
        settings: Any,
        settled: Callable[[Own, str], None],
    ) -> None:
        self.store, self.model, self.settings = store, model, settings
        self.name, self.incarnation, self.settled = name, incarnation, settled
        self.number, self.contributors = 0, []
        self.own: Own | None = None
        self.snapshot_due = False
        self.outer: Outer
        self._roster: dict[str, list[float]] = {}
        fragments = range(len(model.indices))
        self._owed = [model.nothing_owed(p) for p in fragments]
        self._since = [0 for _ in fragments]
        self._posts: dict[str, Post] = {}
        self._first_seen: dict[str, int] = {}
        self._complete: float | None = None
        self._told = time.monotonic()

    @property
    def fragment(self) -> int:
        """Of the next round."""
        return self.number % len(self.model.indices)

    def enter(self, params: Arrays) -> None:
        """Takes up the run where it stands, or begins it at these parameters."""
        own = _run.description(self.model, self.settings.quorum)
        run = _run.read(self.store) or _run.begin(self.store, self.model, own, params)
        _run.check(run, own)
        snapshots = self.store.keys(_rounds.SNAPSHOTS)
        self._load(snapshots[-1] if snapshots else run["initial"])
        while self.advance():
            pass
        self._since = [self.number for _ in self._since]

    def advance(self) -> bool:
        """Takes the outer step of the next round, if it is committed."""
        data = self.store.get(_rounds.commit_key(self.number))
        if data is None:
            return False
        commit = _rounds.read_commit(data, self.number)
        if commit["before"] != self.outer.digest:
            raise RunError(
                f"before round {self.number} the outer parameters of this site, "
                f"{self.name!r}, have the digest {self.outer.digest}, and those of the "
                f"run {commit['before']}: give all sites the same outer optimizer, "
                "compressor, and versions of JAX and Optax, and start this one again"
            )
        contributors, messages = commit["contributors"], []
        for entry in contributors:
            message = self._message(entry)
            if message is None:  # collected, since this site was away
                return self._jump()
            messages.append(message)
        if contributors:
            weights = [entry["weight"] for entry in contributors]
            pairs = zip(messages, weights, strict=True)
            self.outer = self.model.step(
                self.outer, self.fragment, pairs, commit["expected"]
            )
        self._follow(commit)
        if contributors and contributors[0]["name"] == self.name:
            self.snapshot_due |= self.number % self.settings.snapshot_every == 0
        return True

    def bring(self, captured: Arrays, anchor: Arrays, tokens: float, fragment: int):
        """Makes a message of what the parameters have moved from the anchor."""
        part = self.model.part(anchor, fragment)
        drift = self.model.drift(fragment, captured, part)
        message, left = self.model.encode(fragment, drift, self._owed[fragment])
        uid = uuid.uuid4().hex
        self.own = Own(fragment, captured, part, drift, message, left, tokens, uid)

    def post(self) -> None:
        """Creates this site's contribution to the next round."""
        own = self.own
        if own is None or own.posted:
            return
        if own.fragment != self.fragment:  # the round it was meant for is over
            self._settle("late")
            return
        self.own = own = own._replace(round=self.number)
        header = {
            "kind": "post",
            "uid": own.uid,
            "name": self.name,
            "round": self.number,
            "before": self.outer.digest,
            "tokens": own.tokens,
            "rounds": self.number + 1 - self._since[own.fragment],
        }
        key = _rounds.post_key(self.number, self.name)
        # If there is one already, a killed predecessor's, that one stands.
        _messages.write(self.store, key, header, own.message)
        self.own, self._told = own._replace(posted=True), time.monotonic()

    def propose(self) -> bool:
        """Creates the commit of the next round if it is time; whether there is one."""
        if self.own is None or not self.own.posted:
            return False
        members = _rounds.members(self.store.keys(_rounds.MEMBERS))
        if members.newest.get(self.name, 0) > self.incarnation:
            raise RunError(
                f"another site has joined the run as {self.name!r} since this one did, "
                "and this one stops: give every site a name of its own"
            )
        keys = self.store.keys(_rounds.post_key(self.number))
        for name in [key.rpartition("/")[2] for key in keys]:
            if name not in self._posts:
                self._posts[name] = self._read(name)
        expected = self._expected(members)
        missing = sorted(expected - set(self._posts))
        if len(self._posts) < members.needed(self.settings.quorum):
            self._tell(f"has {len(self._posts)} of the posts it needs", missing)
            return False
        now = time.monotonic()
        self._complete = now if self._complete is None else self._complete
        if missing and now - self._complete < self.settings.grace:
            return False
        self._commit(members)
        return True

    def snapshot(self) -> None:
        """Writes the outer side in full, and collects what lies long before."""
        _run.write_snapshot(
            self.store, self.model, self.outer, self._roster, self.number
        )
        self.snapshot_due = False

    def _expected(self, members: _rounds.Members) -> set[str]:
        """Who is waited for: who contributed lately, and who is new."""
        for name in members.newest:
            self._first_seen.setdefault(name, self.number)
        last = {name: pair[0] for name, pair in self._roster.items()}
        lately = self.number - _rounds.FORGET
        found = {
            name
            for name, first in self._first_seen.items()
            if max(first, last.get(name, 0)) >= lately
        }
        return found - members.gone

    def _commit(self, members: _rounds.Members) -> None:
        posts = list(self._posts.values())
        before = _rounds.digest_of_most(posts, self.outer.digest)
        if before != self.outer.digest:
            raise RunError(
                f"in round {self.number} most sites measure from outer parameters of "
                f"the digest {before}, and this one, {self.name!r}, has "
                f"{self.outer.digest}: give all sites the same outer optimizer, "
                "compressor, and versions of JAX and Optax, and start this one again"
            )
        data = _rounds.commit(
            self.number,
            self.fragment,
            before,
            _rounds.judged(posts, before, self.settings.max_norm),
            self._roster,
            members.gone,
            by=self.name,
        )
        self.store.create(_rounds.commit_key(self.number), data)

    def _read(self, name: str) -> Post:
        """A contribution to the next round, with why it cannot count."""
        key = _rounds.post_key(self.number, name)
        shapes = self.model.messages[self.fragment]
        try:
            found = _messages.read(self.store, key, "post", shapes)
            if found is None:
                raise Refused("it is gone")
            header, arrays = found
            _rounds.check_post(header, name, self.number)
        except Refused as error:
            return Post(name, why=str(error))
        norm = self.model.norm(self.fragment, arrays)
        return Post(name, header, arrays, norm)

    def _message(self, entry: dict[str, Any]) -> Arrays | None:
        """The arrays of a contributor; None if they have been collected."""
        if self.own is not None and self.own.uid == entry["uid"]:
            return self.own.message
        post = self._posts.get(entry["name"])
        if post is None or post.header.get("uid") != entry["uid"]:
            post = self._read(entry["name"])
            if post.why == "it is gone":
                return None
        if post.header.get("sha256") != entry["sha256"]:
            raise RunError(
                f"the contribution of {entry['name']!r} to round {self.number} is not "
                f"the one that was committed ({post.why or 'another digest'}): "
                "something else writes into the run's folder"
            )
        return post.arrays

    def _follow(self, commit: dict[str, Any]) -> None:
        """Takes down who counted in a round, this site included."""
        for entry in commit["rejected"]:
            text = "round %d: the contribution of %r is not counted: %s"
            log.warning(text, commit["round"], entry["name"], entry["why"])
        self._roster = commit["roster"]
        self.contributors = [entry["name"] for entry in commit["contributors"]]
        self.number = commit["round"] + 1
        self._posts, self._complete = {}, None
        own = self.own
        if own is not None and own.round == commit["round"]:
            counted = any(x["uid"] == own.uid for x in commit["contributors"])
            whys = {entry["name"]: entry["why"] for entry in commit["rejected"]}
            self._settle("" if counted else whys.get(self.name, "late"))

    def _settle(self, why: str) -> None:
        own, self.own = self.own, None
        if own is None:
            return
        if why != "late":
            self._owed[own.fragment] = (
                self.model.nothing_owed(own.fragment) if why else own.left
            )
            self._since[own.fragment] = self.number
        self.settled(own, why)

    def _jump(self) -> bool:
        """Takes up the newest snapshot, and what the commits until then say."""
        keys = self.store.keys(_rounds.SNAPSHOTS)
        key = keys[-1] if keys else ""
        last = int(key.removeprefix(_rounds.SNAPSHOTS) or -1)
        if last < self.number:
            raise RunError(
                f"contributions to round {self.number} are gone, and no snapshot has "
                "what came of them: something else removes objects of the run"
            )
        log.info("rounds %d to %d are read from a snapshot", self.number, last)
        commits = []
        for number in range(self.number, last + 1):
            data = self.store.get(_rounds.commit_key(number))
            if data is None:
                raise RunError(f"the commit of round {number} is missing in the run")
            commits.append(_rounds.read_commit(data, number))
        self._load(key)
        for commit in commits:
            self._follow(commit)
        return True

    def _load(self, key: str) -> None:
        self.outer, self._roster, self.number = _run.load(self.store, self.model, key)
        self._posts, self._complete = {}, None

    def _tell(self, what: str, missing: list[str]) -> None:
        """What a round waits for, if that takes long, and again after as long."""
        if time.monotonic() - self._told > _PATIENCE:
            self._told = time.monotonic()
            who = ", ".join(missing) or "nobody known"
            text = "round %d of %s %s; not there: %s"
            log.warning(text, self.number, self.store.url, what, who)
