"""How much a sync sends, known before the number of replicas is."""

from typing import NamedTuple


class Payload(NamedTuple):
    """Bytes of one sync, by how they travel; from shapes alone.

    How many of them a replica sends depends on the number N of replicas, and for means
    and gathered parts in different ways. Payloads add up by kind with `+`.

    Attributes:
      averaged: bytes of an all-reduce that costs as much; 2 (N - 1) / N times as many
        are sent.
      gathered: bytes that each replica puts into all-gathers; N - 1 times as many are
        sent, to each of the others.

    Example:
      >>> Payload(averaged=100) + Payload(averaged=20, gathered=3)
      Payload(averaged=120, gathered=3)
    """

    averaged: int = 0
    gathered: int = 0

    # In place of the tuples' own, which would concatenate them.
    def __add__(self, other: "Payload") -> "Payload":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Payload(self.averaged + other.averaged, self.gathered + other.gathered)

    def as_averaged(self, replicas: int) -> float:
        """Bytes of the all-reduce for which so many replicas send as much.

        Example:
          >>> Payload(averaged=20, gathered=3).as_averaged(replicas=8)
          32.0
        """
        return self.averaged + self.gathered * replicas / 2


# Of the decision, an int32 all-reduce, and of a replica's weight at a sync, a float32
# all-gather.
FLAG = Payload(averaged=4)
WEIGHT = Payload(gathered=4)
