"""One site's copy of a run: it follows the commits, and contributes to the open round.

Every method may fail with `StoreError` at any request. All but `start` are then called
again: state changes last, and what was written before the failure is in the store.
"""

import logging
import math
import time
import uuid
from typing import Any, NamedTuple

from curvadion_jax.sites import _run
from curvadion_jax.sites._model import Arrays, Model, Outer
from curvadion_jax.sites._run import Received, Roster
from curvadion_jax.sites._store import InvalidError, RunError, Store

log = logging.getLogger("curvadion_jax.sites")

# Seconds for which a round may wait before the log reports it.
_PATIENCE = 60


class Contribution(NamedTuple):
    """What this site contributes to a round."""

    captured: Arrays  # the parameters when the contribution was due
    anchor: Arrays  # the anchor that the training loop had then
    drift: Arrays
    message: Arrays
    residual: Arrays  # once the contribution has counted
    tokens: float  # since the last contribution
    uid: str  # by which commits name it
    round: int = -1  # to which it was sent, perhaps in vain: an answer may be lost
    # Whether it is in the store. False if a killed predecessor's is there in its place,
    # which stands; None if there is none.
    created: bool | None = None


class Follower:
    """See the module."""

    snapshot_every = 10  # rounds
    outer: Outer  # before the open round

    def __init__(
        self, store: Store, model: Model, name: str, quorum: int, grace: float
    ) -> None:
        self.store, self.model, self.name = store, model, name
        self.incarnation, self._quorum, self._grace = 0, quorum, grace
        self.number = 0  # of the open round, the next to be committed
        self.contributors = 0  # to the last one
        self.contribution: Contribution | None = None  # to the open round
        # What the last commit has decided on, and "" if it counted, "late" if it came
        # too late, or why it was rejected.
        self.decided: tuple[Contribution, str] | None = None
        self._roster: Roster = {}
        self._residual = model.zeros()
        self._since = 0  # the round from which this site's tokens are counted
        self._open_round()

    def start(self, params: Arrays) -> None:
        """Takes up the run where it stands, or begins it at these parameters."""
        _run.enter(self.store, self.model, self._quorum)
        self.incarnation = _run.join(self.store, self.name)
        _run.write_first_snapshot(self.store, self.model, params)
        self.outer, self._roster, self.number = _run.load(self.store, self.model)
        while self.advance():
            pass
        self._since = self.number

    def advance(self) -> bool:
        """Takes the outer step of the open round, if it is committed."""
        read, number = self.store.read(_run.commit_key(self.number)), self.number
        if read is None:
            return False
        commit, outer, after = read[0], self.outer, number + 1
        self._check_digest(commit["before"])
        contributors, roster = commit["contributors"], commit["roster"]
        found = [self._committed(entry) for entry in contributors]
        if None in found:  # collected while this site was away
            outer, roster, after = _run.load(self.store, self.model, after)
        elif found:
            due = number > 0 and number % self.snapshot_every == 0
            if due and contributors[0]["name"] == self.name:
                # The commit has confirmed the outer side before it.
                _run.write_snapshot(self.store, outer, self._roster, number)
            weights = [entry["weight"] for entry in contributors]
            pairs = zip([x.arrays for x in found if x], weights, strict=True)
            outer = self.model.step(outer, pairs, len(roster))
        for entry in commit["rejected"]:
            text = "round %d: the contribution of %.99r does not count: %.999r"
            log.warning(text, number, entry["name"], entry["why"])
        self.outer, self._roster, self.number = outer, roster, after
        self.contributors = len(contributors)
        self._open_round()
        own, self.decided = self.contribution, None
        if own is not None and own.round == number:
            why = self._outcome(own, commit)
            if why != "late":
                self._residual = self.model.zeros() if why else own.residual
                self._since = after
            self.contribution, self.decided = None, (own, why)
        return True

    def prepare(self, captured: Arrays, anchor: Arrays, tokens: float) -> None:
        drift, message, residual = self.model.encode(captured, anchor, self._residual)
        self.contribution = Contribution(
            captured, anchor, drift, message, residual, tokens, uuid.uuid4().hex
        )

    def send(self) -> None:
        """Creates this site's contribution to the open round."""
        own = self.contribution
        if own is None or own.created is not None:
            return
        self.contribution = own = own._replace(round=self.number)
        header = {
            "uid": own.uid,
            "before": self.outer.digest,
            "tokens": own.tokens,
            "rounds": self.number + 1 - self._since,
        }
        key = _run.contribution_key(self.number, self.name)
        created = self.store.write(key, header, own.message)
        self.contribution = own._replace(created=created)

    def propose(self) -> bool:
        """Creates the commit of the open round if it is time.

        Returns:
          Whether there is a commit now, of this site or another.
        """
        if self.contribution is None or self.contribution.created is None:
            return False
        number = self.number
        members = _run.members(self.store.keys(_run.MEMBERS))
        if members.newest.get(self.name, 0) > self.incarnation:
            raise RunError(
                f"Another site has joined the run as {self.name!r} since this one "
                "did, and this one stops. Give every site a name of its own."
            )
        listed, strays = self.store.objects(_run.contribution_key(number, ""))
        keys = {meta["path"] for meta in listed}
        # Only contributions of members are read. A listing with strays may lack names.
        for name in members.newest:
            there = strays or _run.contribution_key(number, name) in keys
            if there and name not in self._received:
                self._read(name)
        now = time.monotonic()
        if len(self._received) < members.needed(self._quorum):
            self._report(now, members)
            return False
        self._complete = now if self._complete is None else self._complete
        awaited = _run.expected(self._roster, number, members.left)
        if awaited.keys() - self._received and now - self._complete < self._grace:
            return False
        received = [self._received[name] for name in sorted(self._received)]
        before = self.outer.digest
        self._check_digest(_run.digest_of_most(received, before))
        judged = _run.judged(received, before)
        run = self._roster, members, self._quorum
        commit = _run.commit(number, before, judged, *run)
        self.store.write(_run.commit_key(number), commit)
        return True

    def _open_round(self) -> None:
        self._received: dict[str, Received] = {}
        self._complete: float | None = None  # when the quorum was there
        self._reported: float | None = None

    def _read(self, name: str) -> Received | None:
        """A contribution to the open round, as it is in the store; None if it is not.

        One that cannot count is returned with the reason.
        """
        key = _run.contribution_key(self.number, name)
        try:
            found = self.store.read(key, self.model.message, exists=True)
            if found is None:
                return None
            _run.check_contribution(found[0])
            norm = self.model.norm(found[1])
            why = "" if math.isfinite(norm) else "It contains NaN or Inf."
            received = Received(name, *found, norm, why)
        except InvalidError as error:
            received = Received(name, {}, [], why=str(error))
        self._received[name] = received
        return received

    def _committed(self, entry: dict[str, Any]) -> Received | None:
        """A contribution that counts in the open round; None if it was collected."""
        found = self._received.get(entry["name"])
        if found is None or found.header.get("sha256") != entry["sha256"]:
            found = self._read(entry["name"])
        if found is not None and found.header.get("sha256") != entry["sha256"]:
            raise RunError(
                f"The contribution of {entry['name']!r} to round {self.number} is not "
                f"the committed one. {found.why or 'It has another digest.'} Find out "
                "what else writes into the run's folder."
            )
        return found

    def _check_digest(self, theirs: Any) -> None:
        if theirs != self.outer.digest:
            raise RunError(
                f"Before round {self.number} the outer parameters of this site, "
                f"{self.name!r}, have the digest {self.outer.digest} and the run's "
                f"{theirs!r:.40}. Give all sites the same outer optimizer, compressor, "
                "JAX and Optax, and start this site again."
            )

    def _report(self, now: float, members: _run.Members) -> None:
        """Logs once a minute that a round lacks its quorum."""
        self._reported = now if self._reported is None else self._reported
        if now - self._reported > _PATIENCE:
            self._reported = now
            text = "round %d of %s has %d of the contributions it needs; missing: %s"
            missing = set(members.newest) - members.left - set(self._received)
            who = ", ".join(sorted(missing)) or "nobody known"
            log.warning(text, self.number, self.store.url, len(self._received), who)

    def _outcome(self, own: Contribution, commit: dict[str, Any]) -> str:
        if any(entry["uid"] == own.uid for entry in commit["contributors"]):
            return ""
        for entry in commit["rejected"]:
            # A predecessor of this name may have contributed to this round.
            unread = entry["uid"] is None and entry["name"] == self.name
            if entry["uid"] == own.uid or (unread and own.created):
                return entry["why"]
        return "late"
