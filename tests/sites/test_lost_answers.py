"""A post that arrived, and whose answer did not."""

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore
from site_steps import ByHand


class LosesAnswers:
    """A store that does what it is told, and then breaks off, once."""

    def __init__(self, store):
        self._store, self.lost = store, False
        self.get, self.list = store.get, store.list

    def put(self, key, data, **options):
        self._store.put(key, data, **options)
        if key.startswith("rounds/") and not self.lost:
            self.lost = True
            raise GenericError("connection reset")


def test_a_post_whose_answer_was_lost_counts_once():
    store = MemoryStore()
    a, b = ByHand(LosesAnswers(store), "a"), ByHand(store, "b", grace=0.0)
    a.bring(1.0)
    with pytest.raises(OSError, match="connection reset"):
        a.follower.post()
    b.post(1.0)
    b.commit()
    a.follow()
    assert a.outcomes == [""]
    assert a.follower.own is None
    a.follower.post()
    assert a.moved() == b.moved() == 1.0


def test_a_post_whose_answer_was_lost_is_known_again():
    a = ByHand(LosesAnswers(MemoryStore()), "a")
    a.bring(1.0)
    with pytest.raises(OSError, match="connection reset"):
        a.follower.post()
    a.follower.post()
    a.commit()
    assert a.outcomes == [""]
