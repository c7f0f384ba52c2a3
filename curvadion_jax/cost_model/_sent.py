"""How many bytes a replica sends: in a sync, and in a step.

An all-reduce of B bytes over N replicas counts as 2(N-1)/N B, the least possible number
of bytes, which a ring sends; an all-gather as N-1 times what each replica puts in.
Wherever a payload is asked for, a number stands for bytes that are averaged.
"""

from curvadion_jax._payload import FLAG, Payload
from curvadion_jax.cost_model._checks import check_count, check_not_negative, check_rate


def sync_bytes(payload: float | Payload, replicas: int) -> float:
    """Bytes that one replica sends in a sync.

    Args:
      payload: Payload of the sync, such as what a compressor's `payload` returns; a
        number is bytes that are averaged.
      replicas: Number of replicas N.

    Returns:
      2(N-1)/N times what is averaged and N-1 times what is gathered, in bytes.

    Raises:
      ValueError: If a payload is negative or `replicas` below 1.
      TypeError: If one of them is not a number.

    Examples:
      >>> from curvadion_jax.compressors import Payload
      >>> from curvadion_jax.cost_model import sync_bytes
      >>> sync_bytes(Payload(averaged=8, gathered=2), replicas=4)  # 12 + 6
      18.0
    """
    averaged, gathered = by_kind(payload)
    replicas = check_count("replicas", replicas, 1)
    return 2 * (replicas - 1) * averaged / replicas + (replicas - 1) * gathered


def by_kind(payload: float | Payload) -> tuple[float, float]:
    """Bytes averaged and bytes gathered."""
    kinds = payload if isinstance(payload, Payload) else (payload, 0)
    for size in kinds:
        check_not_negative("payload", size, "bytes")
    return kinds


def bytes_per_step(
    sync_payload: float | Payload,
    replicas: int,
    sync_rate: float = 1.0,
    flag: bool = True,
    ask_every: int = 1,
) -> float:
    """Bytes that one replica sends in a step, on average.

    Args:
      sync_payload: Payload of one sync; a number is bytes that are averaged.
      replicas: Number of replicas N.
      sync_rate: Share of the steps that sync, in [0, 1].
      flag: Whether a 4-byte flag is reduced to decide.
      ask_every: Steps of which one reduces the flag, as in `adaptive_sync`.

    Returns:
      Bytes per step, as in :func:`sync_bytes`.

    Raises:
      ValueError: If an argument is out of range.
      TypeError: If one of them is not a number.

    Examples:
      >>> from curvadion_jax.cost_model import bytes_per_step
      >>> bytes_per_step(1000, replicas=2, sync_rate=0.25)
      254.0
    """
    check_rate("sync_rate", sync_rate)
    asked = sync_bytes(FLAG, replicas) / check_count("ask_every", ask_every, 1)
    return sync_rate * sync_bytes(sync_payload, replicas) + (asked if flag else 0)
