"""One site's copy of a run: it follows the commits, and contributes to the open round.

Every method may fail with `StoreError` at any request, and is then called again: state
changes last, and what was written already is found there.
"""

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from curvadion_jax.sites import _rounds, _run, _store
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._rounds import Contribution, Received, Roster
from curvadion_jax.sites._store import InvalidError, RunError, Store

log = logging.getLogger("curvadion_jax.sites")

# Seconds for which a round may wait before the log reports it.
_PATIENCE = 60


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of :func:`join`, and two that nobody sets."""

    every: int = 30
    quorum: int = 1
    grace: float = 30.0
    max_lag: float = 60
    keep: float = 1.0
    poll: float = 1.0
    # Rounds between snapshots.
    snapshot_every: int = 10
    # A contribution is rejected beyond so many times the median norm, of three or more.
    max_norm: float = 10.0


class Follower:
    """See the module.

    Attributes:
      number: of the open round, the next to be committed.
      outer: the outer side before it.
      contribution: to a round that is not committed, or None.
      on_outcome: called with a contribution and "" if it counted, "late" if it came too
        late, else why it was rejected.
      contributors: names in the last commit.
      snapshot: the outer side, roster and number that this site is to write, or None.
    """

    def __init__(
        self, store: Store, model: Model, name: str, incarnation: int, settings: Any
    ) -> None:
        self.store, self.model, self.settings = store, model, settings
        self.name, self.incarnation = name, incarnation
        self.on_outcome: Callable[[Contribution, str], None]
        self.number, self.contributors = 0, []
        self.contribution: Contribution | None = None
        self.snapshot: tuple[Outer, Roster, int] | None = None
        self.outer: Outer
        self._run: dict[str, Any] = {}
        self._roster: Roster = {}
        self._residual = model.zeros()
        self._since = 0  # the round from which this site's tokens are counted
        self._first_seen: dict[str, int] = {}
        self._close()

    @property
    def progress(self) -> int:
        """How far `start` has come; grows."""
        return bool(self._run) + self.number

    def start(self, params: Arrays) -> None:
        """Takes up the run where it stands, or begins it at these parameters."""
        if not self._run:
            store, model = self.store, self.model
            run = _run.enter(store, model, self.settings.quorum, params)
            self.outer, self._roster, self.number = _run.load(store, model, run)
            self._run = run
        while self.advance():
            pass
        self._since = self.number

    def advance(self) -> bool:
        """Takes the outer step of the open round, if it is committed."""
        data = self.store.get(_rounds.commit_key(self.number), _store.HEADER)
        if data is None:
            return False
        commit = _rounds.read_commit(data, self.number)
        before, contributors = self.outer, commit["contributors"]
        if commit["before"] != before.digest:
            raise _run.mismatch(self.name, self.number, before.digest, commit["before"])
        messages, roster, number = [], commit["roster"], self.number + 1
        for entry in contributors:
            message = self._committed(entry)
            if message is None:  # collected, since this site was away
                outer, roster, number = _run.load(
                    self.store, self.model, self._run, number
                )
                break
            messages.append((message, entry["weight"]))
        else:
            outer = before
            if messages:
                outer = self.model.step(before, messages, commit["expected"])
            # The commit confirms the outer side before it: that is what may be kept.
            due = self.number and self.number % self.settings.snapshot_every == 0
            if due and contributors and contributors[0]["name"] == self.name:
                self.snapshot = before, self._roster, self.number
        for entry in commit["rejected"]:
            text = "round %d: the contribution of %.99r is not counted: %.999r"
            log.warning(text, commit["round"], entry["name"], entry["why"])
        self.outer, self._roster, self.number = outer, roster, number
        self.contributors = [entry["name"] for entry in contributors]
        self._close()
        own = self.contribution
        if own is not None and own.round == commit["round"]:
            counted = any(x["uid"] == own.uid for x in contributors)
            self._conclude("" if counted else self._why(own, commit["rejected"]))
        return True

    def prepare(self, captured: Arrays, anchor: Arrays, tokens: float) -> None:
        """Makes a contribution of how far the parameters are from the anchor."""
        drift, message, residual = self.model.encode(captured, anchor, self._residual)
        self.contribution = Contribution(
            captured, anchor, drift, message, residual, tokens, uuid.uuid4().hex
        )

    def send(self) -> None:
        """Creates this site's contribution to the open round."""
        own = self.contribution
        if own is None or own.sent:
            return
        self.contribution = own = own._replace(round=self.number)
        header = {
            "kind": "contribution",
            "uid": own.uid,
            "run": self._run["sha256"],
            "name": self.name,
            "round": self.number,
            "before": self.outer.digest,
            "tokens": own.tokens,
            "rounds": self.number + 1 - self._since,
        }
        key = _rounds.contribution_key(self.number, self.name)
        # If a killed predecessor's is there already, that one stands.
        created, digest = _store.write(self.store, key, header, own.message)
        if created:
            self._receive(self.name, header | {"sha256": digest}, own.message)
        self.contribution = own._replace(sent=True, created=created)

    def propose(self) -> bool:
        """Creates the commit of the open round if it is time; whether there is one."""
        if self.contribution is None or not self.contribution.sent:
            return False
        number, settings = self.number, self.settings
        members = _rounds.members(self.store.keys(_rounds.MEMBERS))
        if members.newest.get(self.name, 0) > self.incarnation:
            raise RunError(
                f"Another site has joined the run as {self.name!r} since this one "
                "did, and this one stops. Give every site a name of its own."
            )
        listed, strays = self.store.objects(_rounds.contribution_key(number))
        names = {meta["path"].rpartition("/")[2] for meta in listed}
        # Of what else lies there nothing is read. A listing with strays may lack names.
        for name in members.newest if strays else sorted(names & set(members.newest)):
            if name not in self._received:
                self._read(name, listed=name in names)
        missing = sorted(self._expected(members) - set(self._received))
        now = time.monotonic()
        if len(self._received) < members.needed(settings.quorum):
            self._report(now, missing)
            return False
        self._complete = now if self._complete is None else self._complete
        if missing and now - self._complete < settings.grace:
            return False
        received = list(self._received.values())
        before = _rounds.digest_of_most(received, self.outer.digest)
        if before != self.outer.digest:
            raise _run.mismatch(self.name, number, self.outer.digest, before)
        judged = _rounds.judged(received, before, settings.max_norm)
        run = self._roster, members, settings.quorum
        data = _rounds.commit(number, before, judged, *run, by=self.name)
        self.store.create(_rounds.commit_key(number), data)
        return True

    def write_snapshot(self) -> None:
        """Writes the outer side in full if this site is to."""
        if self.snapshot is not None:
            _run.write_snapshot(self.store, self._run, *self.snapshot)
            self.snapshot = None

    def _close(self) -> None:
        """The open round is another one."""
        self._received: dict[str, Received] = {}
        self._complete: float | None = None
        self._reported: float | None = None

    def _receive(self, name: str, header: dict[str, Any], arrays: Arrays) -> Received:
        found = Received(name, header, arrays, self.model.norm(arrays))
        self._received[name] = found
        return found

    def _read(self, name: str, listed: bool = True) -> Received | None:
        """A contribution to the open round, as it is in the store."""
        key = _rounds.contribution_key(self.number, name)
        why = _rounds.GONE
        try:
            run = self._run["sha256"], self.model.message
            found = _store.read(self.store, key, "contribution", *run)
            if found is not None:
                _rounds.check_contribution(found[0], name, self.number)
                return self._receive(name, *found)
            if not listed:
                return None
        except InvalidError as error:
            why = str(error)
        self._received[name] = Received(name, why=why)
        return self._received[name]

    def _committed(self, entry: dict[str, Any]) -> Arrays | None:
        """The arrays of a contributor; None if they have been collected."""
        found = self._received.get(entry["name"])
        if found is None or found.header.get("sha256") != entry["sha256"]:
            found = self._read(entry["name"])
        if found is None or found.why == _rounds.GONE:
            return None
        if found.header.get("sha256") != entry["sha256"]:
            raise RunError(
                f"The contribution of {entry['name']!r} to round {self.number} is not "
                f"the one that was committed ({found.why or 'another digest'}). "
                "Something else writes into the run's folder."
            )
        return found.arrays

    def _expected(self, members: _rounds.Members) -> set[str]:
        """Who is waited for: who contributed lately, and who is new."""
        for name in members.newest:
            self._first_seen.setdefault(name, self.number)
        last = {name: pair[0] for name, pair in self._roster.items()}
        return {
            name
            for name, first in self._first_seen.items()
            if max(first, last.get(name, 0)) >= self.number - _rounds.FORGET
            and name not in members.left
        }

    def _report(self, now: float, missing: list[str]) -> None:
        """Of a round without its quorum, if that takes long, and again after that."""
        self._reported = now if self._reported is None else self._reported
        if now - self._reported > _PATIENCE:
            self._reported = now
            text = "round %d of %s has %d of the contributions it needs; missing: %s"
            who = ", ".join(missing) or "nobody known"
            log.warning(text, self.number, self.store.url, len(self._received), who)

    def _why(self, own: Contribution, rejected: list[dict[str, Any]]) -> str:
        """Why a contribution that is not counted is not."""
        for entry in rejected:
            # A predecessor of this name may have contributed to this round.
            unread = entry["uid"] is None and entry["name"] == self.name
            if entry["uid"] == own.uid or (unread and own.created):
                return entry["why"]
        return "late"

    def _conclude(self, why: str) -> None:
        own, self.contribution = self.contribution, None
        if own is None:
            return
        if why != "late":
            self._residual = self.model.zeros() if why else own.residual
            self._since = self.number
        self.on_outcome(own, why)
