r"""How long a sync over N replicas takes on one link.

The usual model of a message: latency plus size over bandwidth, :math:`\alpha + B/\beta`
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005). Two algorithms matter here:

* **ring**, for payloads of megabytes and more: every replica sends the least possible
  number of bytes, 2(N-1)/N B, in 2(N-1) messages one after another;
* **tree** (up and down again) or **recursive doubling**, for the flag's four bytes:
  only the number of messages in a row counts, and it grows with log2 N.

An all-gather is half of a ring: N-1 messages of what each replica puts in.

Links are taken to be equal between all pairs of replicas, not shared, and the same in
both directions. Arithmetic on the received data costs no time.
"""

import math
from dataclasses import dataclass

from curvadion_jax._payload import Payload
from curvadion_jax.cost_model._checks import (
    check_count,
    check_not_negative,
    check_positive,
    check_type,
)
from curvadion_jax.cost_model._sent import all_gather_bytes, all_reduce_bytes, by_kind


@dataclass(frozen=True)
class Link:
    """A link from a replica to its neighbours.

    Args:
      bandwidth: What one replica can send, in bits per second. Note bits: a
        100 Gb/s Ethernet port is `100e9`.
      round_trip_time: Time for a small message there and back, in seconds.

    Raises:
      ValueError: If the bandwidth is not above 0 or the time is negative.

    Examples:
      >>> from curvadion_jax.cost_model import Link
      >>> Link(bandwidth=5e9, round_trip_time=0.07).latency  # seconds, one way
      0.035
    """

    bandwidth: float
    round_trip_time: float

    def __post_init__(self) -> None:
        check_positive("Link.bandwidth", self.bandwidth, "bits per second")
        check_not_negative("Link.round_trip_time", self.round_trip_time, "seconds")

    @property
    def latency(self) -> float:
        """Latency of one message one way, half of the round trip, in seconds."""
        return self.round_trip_time / 2

    def message_time(self, payload: float) -> float:
        """Time of one message of `payload` bytes one way, in seconds."""
        return self.latency + 8 * payload / self.bandwidth


def _check_link(link: Link) -> None:
    check_type("link", link, Link, "Link(bandwidth=5e9, round_trip_time=0.07)")


def ring_time(payload: float | Payload, replicas: int, link: Link) -> float:
    r"""Time of a ring all-reduce, and of an all-gather after it.

    .. math::
      2(N-1)\,\alpha + \frac{2(N-1)}{N}\,\frac{B}{\beta}
      \quad\text{and}\quad (N-1)\,\alpha + (N-1)\,\frac{k}{\beta}

    The algorithm for large payloads: a reduce-scatter and an all-gather of N-1
    messages each. Used here for every sync.

    Args:
      payload: What is averaged (B) and gathered (k); a number is B, in bytes.
      replicas: Number of replicas N.
      link: Latency (alpha) and bandwidth (beta).

    Returns:
      Seconds; 0 for one replica or an empty payload.

    Raises:
      ValueError: If `payload` is negative or `replicas` below 1.

    Examples:
      >>> from curvadion_jax.cost_model import Link, ring_time
      >>> ring_time(1e9, replicas=2, link=Link(8e9, 0.1))  # 2 * 0.05 + 1.0
      1.1
    """
    _check_link(link)
    averaged, gathered = by_kind(payload)
    reduced = all_reduce_bytes(averaged, replicas)
    passed_on = all_gather_bytes(gathered, replicas)
    rounds = (replicas - 1) * (2 * (reduced > 0) + (passed_on > 0))
    return rounds * link.latency + 8 * (reduced + passed_on) / link.bandwidth


def tree_time(payload: float, replicas: int, link: Link) -> float:
    r"""Time of an all-reduce up a binary tree and down again.

    .. math:: 2 \lceil \log_2 N \rceil \left(\alpha + \frac{B}{\beta}\right)

    For small payloads, where the number of messages in a row decides. Used here for
    the flag: with two replicas it costs one round trip.

    Args:
      payload: Size of what is reduced (B), in bytes.
      replicas: Number of replicas N.
      link: Latency (alpha) and bandwidth (beta).

    Returns:
      Seconds; 0 for one replica or an empty payload.

    Raises:
      ValueError: If `payload` is negative or `replicas` below 1.

    Examples:
      >>> from curvadion_jax.cost_model import Link, tree_time
      >>> round(tree_time(4, replicas=8, link=Link(32e9, 0.07)), 6)  # 6 * 0.035
      0.21
    """
    return 2 * recursive_doubling_time(payload, replicas, link)


def recursive_doubling_time(payload: float, replicas: int, link: Link) -> float:
    r"""Time of an all-reduce in which partners exchange at doubling distances.

    .. math:: \lceil \log_2 N \rceil \left(\alpha + \frac{B}{\beta}\right)

    Half of the tree's messages, as both partners send at once: the least that a flag
    can cost. N need not be a power of two for a maximum, since a value that is
    counted twice does no harm.

    Args:
      payload: Size of what is reduced (B), in bytes.
      replicas: Number of replicas N.
      link: Latency (alpha) and bandwidth (beta).

    Returns:
      Seconds; 0 for one replica or an empty payload.

    Raises:
      ValueError: If `payload` is negative or `replicas` below 1.

    Examples:
      >>> from curvadion_jax.cost_model import Link, recursive_doubling_time
      >>> round(recursive_doubling_time(4, replicas=8, link=Link(32e9, 0.07)), 6)
      0.105
    """
    _check_link(link)
    replicas = check_count("replicas", replicas, 1)
    if check_not_negative("payload", payload, "bytes") == 0:
        return 0.0
    return math.ceil(math.log2(replicas)) * link.message_time(payload)
