"""The round that is open: who has posted to it, and when its commit is proposed."""

import logging
import time
from typing import Any

from curvadion_jax.sites import _messages, _rounds, _run
from curvadion_jax.sites._messages import Refused, RunError
from curvadion_jax.sites._model import Arrays, Model
from curvadion_jax.sites._rounds import Post, Roster
from curvadion_jax.sites._store import Store

log = logging.getLogger("curvadion_jax.sites")

# Seconds for which a round may wait before the log says so.
_PATIENCE = 60


class Proposals:
    """What one site knows of the open round, until `close`."""

    def __init__(
        self, store: Store, model: Model, name: str, incarnation: int, settings: Any
    ) -> None:
        self._store, self._model, self._settings = store, model, settings
        self._name, self._incarnation = name, incarnation
        self._first_seen: dict[str, int] = {}
        self.close()

    def close(self) -> None:
        """The round is over."""
        self._posts: dict[str, Post] = {}
        self._complete: float | None = None
        self._told: float | None = None

    def add(self, name: str, header: dict[str, Any], arrays: Arrays) -> Post:
        """A contribution that is known."""
        norm = self._model.norm(self._model.fragment(header["round"]), arrays)
        self._posts[name] = Post(name, header, arrays, norm)
        return self._posts[name]

    def _read(self, name: str, number: int) -> Post:
        """A contribution, as it is in the store."""
        key = _rounds.post_key(number, name)
        shapes = self._model.messages[self._model.fragment(number)]
        try:
            found = _messages.read(self._store, key, "post", shapes)
            if found is not None:
                _rounds.check_post(found[0], name, number)
                return self.add(name, *found)
            why = _rounds.GONE
        except Refused as error:
            why = str(error)
        self._posts[name] = Post(name, why=why)
        return self._posts[name]

    def committed(self, entry: dict[str, Any], number: int) -> Post:
        """A contribution that a commit lists; its `why` is `GONE` if it is collected.

        Raises:
          RunError: if it is another one.
        """
        post = self._posts.get(entry["name"])
        if post is None or post.header.get("uid") != entry["uid"]:
            post = self._read(entry["name"], number)
        if post.why != _rounds.GONE and post.header.get("sha256") != entry["sha256"]:
            raise RunError(
                f"the contribution of {entry['name']!r} to round {number} is not the "
                f"one that was committed ({post.why or 'another digest'}): something "
                "else writes into the run's folder"
            )
        return post

    def propose(self, number: int, digest: str, roster: Roster) -> bool:
        """Creates the commit if it is time; whether there is one."""
        members = _rounds.members(self._store.keys(_rounds.MEMBERS))
        if members.newest.get(self._name, 0) > self._incarnation:
            raise RunError(
                f"another site has joined the run as {self._name!r} since this one "
                "did, and this one stops: give every site a name of its own"
            )
        for key in self._store.keys(_rounds.post_key(number)):
            name = key.rpartition("/")[2]
            if name not in self._posts:
                self._read(name, number)
        missing = sorted(self._expected(members, number, roster) - set(self._posts))
        now = time.monotonic()
        if len(self._posts) < members.needed(self._settings.quorum):
            self._tell(number, now, missing)
            return False
        self._complete = now if self._complete is None else self._complete
        if missing and now - self._complete < self._settings.grace:
            return False
        posts = list(self._posts.values())
        before = _rounds.digest_of_most(posts, digest)
        if before != digest:
            raise _run.differs(self._name, number, digest, before)
        judged = _rounds.judged(posts, before, self._settings.max_norm)
        where = number, self._model.fragment(number), before
        data = _rounds.commit(*where, judged, roster, members.gone, by=self._name)
        self._store.create(_rounds.commit_key(number), data)
        return True

    def _expected(
        self, members: _rounds.Members, number: int, roster: Roster
    ) -> set[str]:
        """Who is waited for: who contributed lately, and who is new."""
        for name in members.newest:
            self._first_seen.setdefault(name, number)
        last = {name: pair[0] for name, pair in roster.items()}
        found = {
            name
            for name, first in self._first_seen.items()
            if max(first, last.get(name, 0)) >= number - _rounds.FORGET
        }
        return found - members.gone

    def _tell(self, number: int, now: float, missing: list[str]) -> None:
        """Of a round without its quorum, if that takes long, and again after that."""
        self._told = now if self._told is None else self._told
        if now - self._told > _PATIENCE:
            self._told = now
            text = "round %d of %s has %d of the posts it needs; not there: %s"
            who = ", ".join(missing) or "nobody known"
            log.warning(text, number, self._store.url, len(self._posts), who)
