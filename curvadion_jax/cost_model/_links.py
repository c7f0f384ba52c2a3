r"""How long a sync over N replicas takes on one link, and the flag that decides it.

The usual model of a message: latency plus size over bandwidth, :math:`\alpha + B/\beta`
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005). Two algorithms matter here:

* **ring**, for payloads of megabytes and more: every replica sends the least possible
  number of bytes, 2(N-1)/N B, in 2(N-1) messages one after another;
* **tree** (up and down again), for the flag's four bytes: only the number of messages
  in a row counts, and it grows with log2 N.

An all-gather is half of a ring: N-1 messages of what each replica puts in.

Links are taken to be equal between all pairs of replicas, not shared, and the same in
both directions. Arithmetic on the received data costs no time.
"""

import math
from dataclasses import dataclass

from curvadion_jax._payload import FLAG, Payload
from curvadion_jax.cost_model._checks import (
    check_count,
    check_not_negative,
    check_positive,
    check_type,
)
from curvadion_jax.cost_model._sent import by_kind, sync_bytes


@dataclass(frozen=True)
class Link:
    """A link from a replica to its neighbours.

    Args:
      bandwidth: What one replica can send, in bits per second. Note bits: a
        100 Gb/s Ethernet port is `100e9`.
      round_trip_time: Time for a small message there and back, in seconds.

    Raises:
      ValueError: If the bandwidth is not above 0 or the time is negative.
      TypeError: If one of them is not a number.

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


def _check_link(link: Link) -> None:
    check_type("link", link, Link, "Link(bandwidth=5e9, round_trip_time=0.07)")


def ring_time(payload: float | Payload, replicas: int, link: Link) -> float:
    r"""Time of a sync: a ring all-reduce, and an all-gather after it.

    .. math::
      2(N-1)\,\alpha + \frac{2(N-1)}{N}\,\frac{B}{\beta}
      \quad\text{and}\quad (N-1)\,\alpha + (N-1)\,\frac{k}{\beta}

    Args:
      payload: What is averaged (B) and gathered (k); a number is B, in bytes.
      replicas: Number of replicas N.
      link: Latency (alpha) and bandwidth (beta).

    Returns:
      Seconds; 0 for one replica or an empty payload.

    Raises:
      ValueError: If `payload` is negative or `replicas` below 1.
      TypeError: If an argument is of the wrong kind.

    Examples:
      >>> from curvadion_jax.cost_model import Link, ring_time
      >>> ring_time(1e9, replicas=2, link=Link(8e9, 0.1))  # 2 * 0.05 + 1.0
      1.1
    """
    _check_link(link)
    averaged, gathered = by_kind(payload)
    sent = sync_bytes(payload, replicas)
    rounds = (replicas - 1) * (2 * (averaged > 0) + (gathered > 0))
    return rounds * link.latency + 8 * sent / link.bandwidth


def flag_time(
    replicas: int, link: Link, *, ask_every: int = 1, hidden_behind: float = 0.0
) -> float:
    r"""Time that steps wait for the flag, on average: the `flag_time` of a `Method`.

    .. math::
      \max(0,\; t_\text{flag} - t_\text{hidden}) \,/\, k \quad\text{with}\quad
      t_\text{flag} = 2 \lceil \log_2 N \rceil \left(\alpha + B/\beta\right)

    Up a binary tree and down again, B = 4 bytes: one round trip for two replicas.

    Args:
      replicas: Number of replicas N.
      link: The link between them: latency (alpha) and bandwidth (beta).
      ask_every: Steps of which one reduces the flag (k), as in `adaptive_sync`.
      hidden_behind: Computation that does not wait for the flag, in seconds a step:
        the forward and backward pass under `triggers.delayed`, 0 without.

    Returns:
      Seconds a step.

    Raises:
      ValueError: If an argument is out of range.
      TypeError: If an argument is of the wrong kind.

    Examples:
      >>> from curvadion_jax.cost_model import Link, flag_time
      >>> link = Link(bandwidth=5e9, round_trip_time=0.1)
      >>> round(flag_time(8, link), 3)  # 3 round trips
      0.3
      >>> round(flag_time(8, link, ask_every=10), 3)
      0.03
      >>> round(flag_time(8, link, hidden_behind=0.2), 3)
      0.1
    """
    _check_link(link)
    replicas = check_count("replicas", replicas, 1)
    ask_every = check_count("ask_every", ask_every, 1)
    check_not_negative("hidden_behind", hidden_behind, "seconds")
    message = link.latency + 8 * FLAG.averaged / link.bandwidth
    flag = 2 * math.ceil(math.log2(replicas)) * message
    return max(0.0, flag - hidden_behind) / ask_every
