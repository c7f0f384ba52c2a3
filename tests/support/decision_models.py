"""Models of triggers in plain Python: what a replica's trigger ought to answer."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Rows of what a replica's trigger sees on a step.
FIRST, SECOND, LIMIT = range(3)


class Seen(NamedTuple):
    """What the model of one replica's trigger sees on a step.

    Attributes:
      numbers: float32[3], those of the rows.
      steps: steps taken before this one.
      syncs: syncs among them.
      local_steps: steps since the last sync, or since the start.
      reported: what the library says that it compared with.
    """

    numbers: np.ndarray
    steps: int
    syncs: int
    local_steps: int
    reported: float


Model = Callable[[Seen], bool]


def flushed(numbers):
    """Zero in place of denormals, as XLA compares them on CPU."""
    tiny = np.abs(numbers) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), numbers)


def signal_model(row=FIRST) -> Model:
    return lambda seen: not seen.numbers[row] <= seen.numbers[LIMIT]


def any_of_model(*models: Model) -> Model:
    return lambda seen: any([model(seen) for model in models])


def at_least_every_model(model: Model, k: int) -> Model:
    return lambda seen: model(seen) | (seen.local_steps + 1 >= k)


def at_most_every_model(model: Model, k: int) -> Model:
    return lambda seen: model(seen) & (seen.local_steps + 1 >= k or seen.syncs == 0)


def after_steps_model(model: Model, steps: int) -> Model:
    return lambda seen: model(seen) | (seen.steps < steps)


def delayed_model(model: Model) -> Model:
    """What was said on the step before, unless a sync has answered it."""
    said = [(True, 0)]

    def request(seen: Seen) -> bool:
        before, syncs = said.pop()
        said.append((model(seen), seen.syncs))
        return before and seen.syncs == syncs

    return request


def remembered_model(model: Model) -> Model:
    """What was requested since the last sync."""
    requested = []

    def request(seen: Seen) -> bool:
        if model(seen):
            requested.append(seen.syncs)
        return seen.syncs in requested

    return request


def budget_model(rate, ahead, behind) -> Model:
    def request(seen: Seen) -> bool:
        wanted = not seen.numbers[FIRST] <= seen.reported
        paid = rate * (seen.steps + 1)
        allowed = seen.syncs + 1 <= paid + ahead
        return (wanted and allowed) or seen.syncs < paid - behind

    return request


def in_all_model() -> Model:
    model = any_of_model(
        remembered_model(signal_model()), delayed_model(signal_model(SECOND))
    )
    return at_least_every_model(at_most_every_model(model, 3), 9)
