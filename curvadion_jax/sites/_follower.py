"""One site's copy of a run: it follows the commits, and brings contributions.

Every method may fail with `StoreError` at any request, and is then called again: state
changes last, and what was written already is found there.
"""

import logging
import uuid
from collections.abc import Callable
from typing import Any

from curvadion_jax.sites import _messages, _rounds, _run
from curvadion_jax.sites._messages import RunError
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._proposals import Proposals
from curvadion_jax.sites._rounds import Own, Roster
from curvadion_jax.sites._store import Store

log = logging.getLogger("curvadion_jax.sites")


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
        self._roster: Roster = {}
        fragments = range(len(model.indices))
        self._owed = [model.nothing_owed(p) for p in fragments]
        self._since = [0 for _ in fragments]
        self._loaded = False
        self._open = Proposals(store, model, name, incarnation, settings)

    @property
    def fragment(self) -> int:
        """Of the next round."""
        return self.model.fragment(self.number)

    @property
    def progress(self) -> int:
        """How far `enter` has come; grows."""
        return self._loaded + self.number

    def enter(self, params: Arrays) -> None:
        """Takes up the run where it stands, or begins it at these parameters."""
        if not self._loaded:
            own, store = _run.description(self.model, self.settings.quorum), self.store
            run = _run.read(store) or _run.begin(store, self.model, own, params)
            _run.check(run, own)
            snapshots = store.keys(_rounds.SNAPSHOTS)
            self._load(snapshots[-1] if snapshots else run["initial"])
            self._loaded = True
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
            ours, theirs = self.outer.digest, commit["before"]
            raise _run.differs(self.name, self.number, ours, theirs)
        contributors, messages = commit["contributors"], []
        for entry in contributors:
            message = self._message(entry)
            if message is None:  # collected, since this site was away
                return self._jump()
            messages.append((message, entry["weight"]))
        if contributors:
            self.outer = self.model.step(
                self.outer, self.fragment, messages, commit["expected"]
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
        created, header = _messages.write(self.store, key, header, own.message)
        if created:
            self._open.add(self.name, header, own.message)
        self.own = own._replace(posted=True, created=created)

    def propose(self) -> bool:
        """Creates the commit of the next round if it is time; whether there is one."""
        if self.own is None or not self.own.posted:
            return False
        return self._open.propose(self.number, self.outer.digest, self._roster)

    def snapshot(self) -> None:
        """Writes the outer side in full, and collects what lies long before."""
        _run.write_snapshot(
            self.store, self.model, self.outer, self._roster, self.number
        )
        self.snapshot_due = False

    def _message(self, entry: dict[str, Any]) -> Arrays | None:
        """The arrays of a contributor; None if they have been collected."""
        post = self._open.committed(entry, self.number)
        return None if post.why == _rounds.GONE else post.arrays

    def _follow(self, commit: dict[str, Any]) -> None:
        """Takes down who counted in a round, this site included."""
        for entry in commit["rejected"]:
            text = "round %d: the contribution of %r is not counted: %s"
            log.warning(text, commit["round"], entry["name"], entry["why"])
        self._roster = commit["roster"]
        self.contributors = [entry["name"] for entry in commit["contributors"]]
        self.number = commit["round"] + 1
        self._open.close()
        own = self.own
        if own is not None and own.round == commit["round"]:
            counted = any(x["uid"] == own.uid for x in commit["contributors"])
            self._settle("" if counted else self._why(own, commit["rejected"]))

    def _why(self, own: Own, rejected: list[dict[str, Any]]) -> str:
        """Why a contribution that is not counted is not."""
        for entry in rejected:
            # One who had this name before may have posted in this round.
            unread = entry["uid"] is None and entry["name"] == self.name
            if entry["uid"] == own.uid or (unread and own.created):
                return entry["why"]
        return "late"

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
        self._open.close()
