"""Counters of a link in shared memory, which may be read while it runs."""

import mmap
from pathlib import Path

# Of each direction, in this order; the direction is the number of the receiving end.
FIELDS = (
    "packets",  # delivered
    "bytes",  # of delivered packets, IP and TCP headers included
    "payload",  # bytes that TCP carried in them, but for the coordinator's connections
    "coordinator",  # bytes of delivered packets to or from the coordinator's port
    "dropped",  # packets that found the queue full
    "lost",  # packets that were lost on the way
    "cut",  # packets that came while the link was cut
)
ENDS = 2


class Counters:
    """64-bit integers in a file that two or more processes have mapped.

    Args:
        file: The file; made if it is not there.
    """

    def __init__(self, file: Path):
        size = 8 * ENDS * len(FIELDS)
        if not file.exists():
            file.write_bytes(bytes(size))
        with file.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")

    def of(self, end: int) -> memoryview:
        """The counters of what is delivered to an end, to be changed in place."""
        return self._numbers[end * len(FIELDS) : (end + 1) * len(FIELDS)]

    def read(self, end: int) -> dict[str, int]:
        """The counters of what is delivered to an end, by name."""
        return dict(zip(FIELDS, self.of(end), strict=True))
