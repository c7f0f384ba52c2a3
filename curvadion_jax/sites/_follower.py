"""One site's copy of a run: it takes outer steps, and contributes to the open round."""

import functools
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from curvadion_jax.sites import _headers, _run
from curvadion_jax.sites._arrays import Arrays
from curvadion_jax.sites._heart import Heart
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._outer_step import Outer
from curvadion_jax.sites._run import Received, Roster
from curvadion_jax.sites._store import InvalidError, Store, StoreError, attempts

log = logging.getLogger(__package__)

# Seconds for which a round may wait, or a store be away, before the log reports it.
PATIENCE = 60.0
# A site that lacks what counted ends with an error after so many seconds without news,
# and after so many of its periods.
_GIVE_UP, _GIVE_UP_PERIODS = 600.0, 3
# Bytes of a round's messages that are kept in any case; of a larger model, its size.
_KEPT = 2**28


class Contribution(NamedTuple):
    """What this site contributes to a round."""

    captured: Arrays  # the parameters when the contribution was due
    anchor: Arrays  # the anchor that the training loop had then
    message: Arrays
    tokens: float  # since the last contribution
    uid: str  # by which commits name it
    sent: bool = False  # whether the store has it, or a killed predecessor's


class _GoneError(Exception):
    """A contribution that counts, by its key, is collected, lost or damaged."""


class Follower:
    """See the module.

    Every method may fail with `StoreError` at any request. All but `start` are then
    called again: state changes last, and what was written is found in the store.
    """

    snapshot_every = 10  # rounds
    outer: Outer  # before the open round
    heart: Heart  # runs while the worker does

    def __init__(
        self, store: Store, model: Model, name: str, quorum: int, grace: float
    ) -> None:
        self.store, self.model, self.name = store, model, name
        self.incarnation, self._quorum, self._grace = 0, quorum, grace
        self.number = 0  # of the open round, the next to be committed
        self.contributors = 0  # to the last one
        self.has_contributed = False  # to any round, as far as the store may know
        self.contribution: Contribution | None = None  # to the open round
        # What has been decided on and is not taken yet, and "" if it counted, "late" if
        # it came too late, or why it was rejected.
        self.decided: tuple[Contribution, str] | None = None
        # Whether training has given something that no round has counted or rejected
        # yet, rounds that were over meanwhile, and the last of them in a row.
        self.has_uncounted = False
        self.missed = self.missed_in_a_row = 0
        # Guards what training gives and takes: `outer`, `number`, `contributors`,
        # `decided`, `has_uncounted`, and the rounds that were missed.
        self.changed = threading.Condition()
        self._roster: Roster = {}
        self._residual = model.zeros()
        self._since = 0  # the round from which this site's tokens are counted
        self._heaviest = ""  # who had most of the weight in the last round
        self._reported = 0.0  # when this site had a contribution, or reported a round
        self._prepared = math.inf  # when it had its last contribution
        self._period = 0.0  # seconds between the last two
        self._open_round()

    def start(self, params: Arrays) -> None:
        """Takes up the run where it stands, or begins it at these parameters."""
        self.model.compile()
        _run.enter(self.store, self.model, self._quorum)
        self.incarnation = _run.join(self.store, self.name)
        self.heart = Heart(self.store, self.name, self.incarnation, self._grace)
        if _run.read_commit(self.store, 0) is None:
            # Of several sites that begin the run at once, the first snapshot stands.
            outer = self.model.outer_step.initial(params)
            _run.write_snapshot(self.store, outer, {}, 0)
        if (found := _run.load(self.store, self.model)) is None:
            raise StoreError(
                f"The store {self.store.url} has no snapshot that can be used. Restore "
                "one, with its body, or begin a run at another URL."
            )
        self.outer, self._roster, self.number = found
        while self.advance():
            pass
        self._since = self.number

    def advance(self) -> bool:
        """Takes the outer step of the open round, if it is committed."""
        number = self.number
        if (commit := _run.read_commit(self.store, number)) is None:
            return False
        self._check_digest(commit["before"])
        contributors, roster = commit["contributors"], commit["roster"]
        outer, after = self.outer, number + 1
        due = number > 0 and number % self.snapshot_every == 0
        if due and contributors and contributors[0]["name"] == self.name:
            # The commit has confirmed the outer side before it.
            _run.write_snapshot(self.store, outer, self._roster, number)
            self._remove_members()
        try:
            if contributors:
                messages = self._messages(contributors)
                outer = self.model.step(outer, messages, len(roster))
        except _GoneError as error:
            outer, roster, after = self._later(str(error))
        self._report_commit(commit)
        for entry in contributors:
            self.heart.contributed(entry["name"])
        decided = None
        if self.contribution is not None:
            decided = self.contribution, self._decide(self.contribution, commit, after)
        with self.changed:
            if decided is not None:
                self.decided, self.contribution = decided, None
            self.outer, self._roster, self.number = outer, roster, after
            self.contributors = len(contributors)
            if self.name in {entry["name"] for entry in contributors}:
                self.missed_in_a_row = 0
            elif self.has_uncounted:
                self.missed += after - number
                self.missed_in_a_row += after - number
            if decided is not None and decided[1] != "late":  # counted, or rejected
                self.has_uncounted = False
            self._open_round()
            self.changed.notify_all()
        return True

    def _messages(
        self, contributors: list[dict[str, Any]]
    ) -> Iterator[tuple[Arrays, float]]:
        """The messages that count, one after the other, with their weights."""
        # One that was gone comes first. Without it nobody needs the others again. (A
        # round that was decided again may do without it.)
        gone = self._gone
        if gone in contributors and self._read(gone, self.store.look) is None:
            raise _GoneError(_run.contribution_key(self.number, gone["name"]))
        for entry in contributors:
            message = self._message(entry)
            if message is None:
                self._gone = entry
                raise _GoneError(_run.contribution_key(self.number, entry["name"]))
            yield message, entry["weight"]

    def _later(self, gone: str) -> tuple[Outer, Roster, int]:
        """The run after the open round, which needs a contribution that is gone.

        Another site may have it in memory, and write a snapshot. Nobody can tell
        whether one has. So this site waits for as long as others contribute, and then
        it ends: if it left the round out, one that has taken it would go elsewhere.
        """
        found = _run.load(self.store, self.model, self.number + 1)
        if found is not None:
            return found
        there, now = self.store.keys("rounds/"), time.monotonic()
        was_away = now - self._looked > PATIENCE  # the store, or this process
        if there != self._there or was_away:
            self._there, self._news = there, now
        self._looked = now
        why = (
            f"{gone} or its body, which counts in round {self.number}, is gone or "
            f"damaged at {self.store.url}, and no later snapshot can be used."
        )
        patience = max(_GIVE_UP, _GIVE_UP_PERIODS * self._period)
        if now - self._news <= patience:
            raise StoreError(
                f"{why} A site that has read it writes one. If none has, restore it, "
                "or remove the round: see 'A contribution that is lost' in "
                "docs/operate-sites.md."
            )
        raise RuntimeError(
            f"{why} Nobody has contributed for {patience / 60:.0f} minutes. If a site "
            "still trains, start the others again: its next snapshot has the round. "
            "Otherwise restore it and start the sites again. If that cannot be done, "
            f"stop all sites, remove what commits/ and rounds/ have of round "
            f"{self.number} and later, and start them: they decide the round again."
        )

    def _decide(self, own: Contribution, commit: dict[str, Any], after: int) -> str:
        """What a commit says of this site's contribution; see `decided`."""
        # What could not be read has no uid in the commit: it is late.
        counted = {entry["uid"] for entry in commit["contributors"]}
        rejected = {entry["uid"]: entry["why"] for entry in commit["rejected"]}
        why = "" if own.uid in counted else rejected.get(own.uid, "late")
        if why == "":
            given = own.captured, own.anchor, own.message
            self.model.leave_unsent(self._residual, *given)
            self._since = after
        elif why != "late":
            self._residual, self._since = self.model.zeros(), after
        return why

    def prepare(self, captured: Arrays, anchor: Arrays, tokens: float) -> None:
        message = self.model.encode(captured, anchor, self._residual)
        uid = uuid.uuid4().hex
        self.contribution = Contribution(captured, anchor, message, tokens, uid)
        self._reported = now = time.monotonic()
        self._period, self._prepared = max(0.0, now - self._prepared), now

    def send(self) -> None:
        """Creates this site's contribution to the open round."""
        own = self.contribution
        if own is None or own.sent:
            return
        header = {
            "uid": own.uid,
            "before": self.outer.digest,
            "tokens": own.tokens,
            "rounds": self.number + 1 - self._since,
        }
        key = _run.contribution_key(self.number, self.name)
        self.has_contributed = True  # also if the store has it and its answer is lost
        self.store.write(key, header, own.message)
        self.contribution = own._replace(sent=True)

    def propose(self) -> bool:
        """Creates the commit of the open round if it is time; whether there is one."""
        own, number = self.contribution, self.number
        if own is None or not own.sent:
            return False
        members = self._members()
        self._receive_listed(members)
        if self.name not in self._received:  # the store has lost it, or its body
            self.contribution = own._replace(sent=False)
        now = time.monotonic()
        needed = members.needed(self._quorum, self._roster)
        if enough := len(self._received) >= needed:
            self._complete = min(self._complete, now)
        awaited = self._awaited(members)
        missing = awaited.keys() - self._received.keys()
        late = [name for name in missing if not self.heart.is_silent(name)]
        if not enough or (late and now - self._complete < self._grace):
            if now - self._reported > PATIENCE:
                self._reported = now
                self._report(members)
                self._mend()
            return False
        received = [self._received[name] for name in sorted(self._received)]
        self._check_majority(received)
        commit = _run.commit(number, self.outer.digest, received, awaited, needed)
        self.store.write(_run.commit_key(number), commit)
        return True

    def _awaited(self, members: _run.Members) -> Roster:
        """Sites that counted in one of the last rounds and have not left."""
        return {
            name: (last, rate)
            for name, (last, rate) in self._roster.items()
            if self.number - last <= _run.FORGET and name not in members.left
        }

    def _members(self) -> _run.Members:
        """The run's members, of which this site is one."""
        members = _run.members(self.store.keys(_run.MEMBERS))
        if members.newest.get(self.name, 0) > self.incarnation:
            raise RuntimeError(
                f"Another site has joined the run as {self.name!r} since this one "
                "did, and this one stops. Give every site a name of its own."
            )
        if self.name not in members.newest:  # the store has lost it
            own_key = _run.member_key(self.name, self.incarnation, "json")
            self.store.create(own_key, b"")
        return members

    def _remove_members(self) -> None:
        """Removes most of those that have left, or are silent and have no share."""
        members = self._members()
        gone = {
            name
            for name in members.newest.keys() - self._roster.keys()
            if name in members.left or self.heart.is_silent(name)
        }
        _run.remove_members(self.store, members, gone, self._quorum)

    def _check_majority(self, received: list[Received]) -> None:
        """Raises an error if most sites have other outer parameters than this one."""
        own = self.outer.digest
        votes = Counter(x.header["before"] for x in received if not x.why)
        for theirs, count in votes.most_common():
            if count > votes[own]:
                self._check_digest(theirs)

    def _open_round(self) -> None:
        self._received: dict[str, Received] = {}
        # Listed, and not there or not readable after all attempts.
        self._not_found: set[str] = set()
        self._complete = math.inf  # when the quorum was there
        # If it is committed and cannot be taken: what was gone at the last look,
        # contributions in the store, and when they last changed.
        self._gone: dict[str, Any] | None = None
        self._there: list[str] | None = None
        self._news = self._looked = 0.0

    def _receive_listed(self, members: _run.Members) -> None:
        """Reads the members' contributions that the store lists and are not known."""
        keys = {
            name: _run.contribution_key(self.number, name) for name in members.newest
        }
        there = {*self.store.keys(_run.contribution_key(self.number, ""))}
        own = self._received.get(self.name)
        if keys.get(self.name) not in there or (own and not own.header):
            # Lost since it was read back, or not readable, which may have changed.
            self._received.pop(self.name, None)
        listed = {name for name, key in keys.items() if key in there}
        self._receive(listed - self._received.keys())

    def _receive(self, names: Iterable[str]) -> None:
        """Reads contributions to the open round, as they are in the store.

        Those that are damaged or not found are looked at again, all together: many of
        them delay the round by no more than one.
        """
        pending = {*names}
        for _ in attempts():
            for name in sorted(pending):
                received, is_certain = self._look(name)
                if received is not None:
                    self._received[name] = received
                if is_certain:
                    pending.remove(name)
            if pending <= self._not_found:
                break
        self._not_found |= pending

    def _look(self, name: str) -> tuple[Received | None, bool]:
        """A contribution to the open round, None if it is not there; is that certain?

        One that cannot count is returned with the reason.
        """
        key = _run.contribution_key(self.number, name)
        try:
            found = self.store.look(key, self.model.message)
            if found is None and name == self.name and self._is_left_behind(key):
                raise InvalidError(
                    f"{key} is older than the last start of its site, and is there "
                    "without a body that can be read."
                )
        except InvalidError as error:
            return Received(name, {}, [], why=str(error)), False
        if found is None:
            return None, False
        try:
            _headers.check_contribution(found[0])
        except InvalidError as error:
            return Received(name, {}, [], why=str(error)), True
        header, arrays = found
        norm = self.model.norm(arrays)
        why = "" if math.isfinite(norm) else "It contains NaN or Inf."
        own = self.contribution
        if own is not None and own.uid == header["uid"]:
            arrays = own.message
        elif not self._has_room(arrays):
            arrays = []
        return Received(name, header, arrays, norm, why), True

    def _is_left_behind(self, key: str) -> bool:
        """Whether a contribution under this site's name is not its own.

        A body is written before its header, so the store has lost it. Only who wrote it
        could write it again: the header, which others may have judged already, cannot
        be replaced. A round with a contribution that cannot count is decided without
        it, and this site's own goes to the next.
        """
        own, header = self.contribution, self.store.header(key)
        return header is not None and own is not None and header.get("uid") != own.uid

    def _has_room(self, arrays: Arrays) -> bool:
        """Whether a message can be kept until the commit, or is read again then."""
        kept = [x for known in self._received.values() for x in known.arrays]
        most = max(self.model.nbytes, _KEPT)
        return sum(x.nbytes for x in [*kept, *arrays]) <= most

    def _message(self, entry: dict[str, Any]) -> Arrays | None:
        """The message of a contribution that counts; None if it is not there."""
        own = self.contribution
        if own is not None and own.uid == entry["uid"]:
            return own.message
        name, sha256 = entry["name"], entry["sha256"]
        known = self._received.get(name)
        if known and known.arrays and known.header["sha256"] == sha256:
            return known.arrays
        return self._read(entry, functools.partial(self.store.read, exists=True))

    def _read(self, entry: dict[str, Any], read: Any) -> Arrays | None:
        """A message as the store has it; None if that is not what has counted."""
        key = _run.contribution_key(self.number, entry["name"])
        with suppress(InvalidError):
            found = read(key, self.model.message)
            if found and found[0]["sha256"] == entry["sha256"]:
                return found[1]
        return None

    def _check_digest(self, theirs: Any) -> None:
        if theirs != self.outer.digest:
            raise RuntimeError(
                f"Before round {self.number} the outer parameters of this site, "
                f"{self.name!r}, have the digest {self.outer.digest} and the run's "
                f"{theirs!r:.40}. Give all sites the same outer optimizer, compressor, "
                "JAX and Optax, and start this site again."
            )

    def _report_commit(self, commit: dict[str, Any]) -> None:
        """Logs what in a commit an operator should look at."""
        for entry in commit["rejected"]:
            text = "round %d: the contribution of %.99r does not count: %.999r"
            log.warning(text, self.number, entry["name"], entry["why"])
        weights = {x["name"]: x["weight"] for x in commit["contributors"]}
        whole, heaviest = math.fsum(weights.values()), self._heaviest
        self._heaviest = ""
        for name, weight in weights.items():
            if len(weights) >= 3 and weight > whole / 2:
                self._heaviest = name
        if self._heaviest not in ("", heaviest):  # Once, and not in every round.
            text = "round %d: %r has %.1f%% of the weight. Compare the sites' tokens."
            share = 100 * weights[self._heaviest] / whole
            log.warning(text, self.number, self._heaviest, share)

    def _report(self, members: _run.Members) -> None:
        """Logs whom a round waits for."""
        text = "round %d of %s has %d of the contributions it needs; missing: %s"
        missing = set(members.newest) - members.left - set(self._received)
        who = ", ".join(sorted(missing)) or "nobody known"
        log.warning(text, self.number, self.store.url, len(self._received), who)

    def _mend(self) -> None:
        """Undoes what may keep a round open if the store has lost an object."""
        # This site's own, since it was read back: it is read again.
        self._received.pop(self.name, None)
        # One that counted before: who could not read it continues from here.
        if _run.has_lost(self.store, self.number):
            _run.write_snapshot(self.store, self.outer, self._roster, self.number)
