"""What the decision to synchronise costs when it is hidden, or made less often."""

from collections.abc import Callable

from curvadion_jax.cost_model._checks import check_count, check_not_negative
from curvadion_jax.cost_model._links import Link, tree_time
from curvadion_jax.cost_model._size import FLAG_BYTES


def flag_time(
    replicas: int,
    link: Link,
    *,
    ask_every: int = 1,
    hidden_behind: float = 0.0,
    algorithm: Callable[[float, int, Link], float] = tree_time,
) -> float:
    r"""Time that steps wait for the flag, on average: the `flag_time` of a `Method`.

    .. math:: \max(0,\; t_\text{flag} - t_\text{hidden}) \,/\, k

    Args:
      replicas: Number of replicas N.
      link: The link between them.
      ask_every: Steps of which one reduces the flag (k), as in `adaptive_sync`.
      hidden_behind: Computation that does not wait for the flag, in seconds a step:
        the forward and backward pass under `triggers.delayed`, 0 without.
      algorithm: Time of an all-reduce of a payload: `tree_time` or
        `recursive_doubling_time`.

    Returns:
      Seconds a step.

    Raises:
      ValueError: If an argument is out of range.
      TypeError: If `replicas` or `ask_every` is not an integer, or another argument of
        the wrong kind.

    Examples:
      >>> from curvadion_jax.cost_model import Link, flag_time
      >>> link = Link(bandwidth=5e9, round_trip_time=0.1)
      >>> times = [
      ...     flag_time(8, link),  # 3 round trips
      ...     flag_time(8, link, ask_every=10),
      ...     flag_time(8, link, hidden_behind=0.2),
      ...     flag_time(8, link, hidden_behind=0.4),
      ... ]
      >>> [round(seconds, 3) for seconds in times]
      [0.3, 0.03, 0.1, 0.0]
    """
    if not callable(algorithm):
        raise TypeError(
            f"algorithm is {algorithm!r}; give a function such as tree_time or "
            "recursive_doubling_time."
        )
    ask_every = check_count("ask_every", ask_every, 1)
    check_not_negative("hidden_behind", hidden_behind, "seconds")
    return max(0.0, algorithm(FLAG_BYTES, replicas, link) - hidden_behind) / ask_every
