"""One direction of a link, with the clock given from outside.

A packet first waits for its turn in a router's queue, whose tokens come at the link's
rate; what finds the queue full is dropped. Then it may be lost, and is delivered a
delay later. Nothing here reads a clock or sends anything.
"""

import collections
import dataclasses
import random
from collections.abc import Iterator

# A router's queue holds at least so many packets.
_SHORTEST_QUEUE = 64
# Tokens that a bucket can hold, in packets.
_BURST = 2


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a link is to be like, in both directions.

    Attributes:
        rate: Bits a second, of packets without Ethernet headers.
        round_trip: Seconds, half of them in each direction.
        loss: Probability that a packet is lost, in [0, 1).
        mtu: Largest packet in bytes.
        congestion: TCP's congestion control, one of Linux's names.
    """

    rate: float
    round_trip: float = 0.0
    loss: float = 0.0
    mtu: int = 1500
    congestion: str = "cubic"

    def __post_init__(self):
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate must be positive bits a second, got {self.rate}")
        if not 0 <= self.round_trip < float("inf"):
            raise ValueError(
                f"round_trip must be seconds from 0 on, got {self.round_trip}"
            )
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be a share in [0, 1), got {self.loss}")
        if not 68 <= self.mtu <= 65535:
            raise ValueError(f"mtu must be 68 to 65535 bytes, got {self.mtu}")

    @property
    def queue(self) -> float:
        """Bytes that may wait: a round trip's worth, and 64 packets at least."""
        return max(self.rate / 8 * self.round_trip, float(_SHORTEST_QUEUE * self.mtu))


class TokenBucket:
    """When bytes may leave that arrive at given times.

    Tokens come at `rate` bits a second, and at most `burst` bytes of them are kept. The
    bucket is described by the moment at which it would have been empty last: a packet
    takes tokens of `size` from then on, and leaves when they have come.

    Args:
        rate: Bits a second.
        burst: Bytes that may leave at once after a pause.

    Examples:
        >>> bucket = TokenBucket(rate=8000, burst=500)
        >>> [bucket.departure(0.0, 500), bucket.departure(0.0, 500)]
        [0.0, 0.5]
    """

    def __init__(self, rate: float, burst: float):
        self._seconds = 8 / rate
        self._saved = burst * self._seconds
        self._empty = -float("inf")

    def departure(self, now: float, size: int) -> float:
        """Take tokens for a packet that is there now; when it leaves."""
        self._empty = max(self._empty, now - self._saved) + size * self._seconds
        return max(now, self._empty)

    def backlog(self, now: float) -> float:
        """Bytes that wait."""
        return max(0.0, self._empty - now) / self._seconds


class Line:
    """Packets on their way in one direction.

    Args:
        conditions: The link.
        seed: Of the losses.

    Attributes:
        dropped: Packets that found the queue full.
        lost: Packets that were lost after it.
    """

    def __init__(self, conditions: Conditions, seed: int):
        self._bucket = TokenBucket(conditions.rate, _BURST * conditions.mtu)
        self._queue, self._loss = conditions.queue, conditions.loss
        self._delay = conditions.round_trip / 2
        self._chance = random.Random(seed).random
        # The delay is the same for all: they arrive in the order in which they leave.
        self._way: collections.deque[tuple[float, bytes]] = collections.deque()
        self.dropped = self.lost = 0

    def send(self, now: float, packet: bytes) -> None:
        """A packet comes to the queue."""
        size = len(packet)
        if self._bucket.backlog(now) + size > self._queue:
            self.dropped += 1
            return
        departure = self._bucket.departure(now, size)
        # A lost packet has taken its time on the wire.
        if self._loss and self._chance() < self._loss:
            self.lost += 1
            return
        self._way.append((departure + self._delay, packet))

    def arrived(self, now: float) -> Iterator[bytes]:
        """Take out what has arrived by now."""
        way = self._way
        while way and way[0][0] <= now:
            yield way.popleft()[1]

    def next_arrival(self) -> float:
        """When the next packet arrives; infinite if none is on its way."""
        return self._way[0][0] if self._way else float("inf")
