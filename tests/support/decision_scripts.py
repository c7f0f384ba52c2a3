"""What happens to replicas, step by step: scripts, given and generated."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from decision_models import FIRST, LIMIT
from hypothesis import strategies as st

REPLICAS, STEPS = 8, 50


class Script(NamedTuple):
    """What happens on every step of every replica.

    Attributes:
      numbers: float32[3, replicas, steps], what the triggers see.
      spoilt: float32[replicas, steps], what is added to an element of the gradient.
      weights: float32[replicas, steps], how much each counts in a sync.
    """

    numbers: np.ndarray
    spoilt: np.ndarray
    weights: np.ndarray

    def __repr__(self) -> str:
        rows = {"first": 0, "second": 0, "limit": 1}
        pairs = [*zip(self.numbers, rows.values(), strict=True), (self.spoilt, 0)]
        pairs.append((self.weights, 1))
        unusual = [
            f"{name}[{index}, {step}] = {float(array[index, step])!r}"
            for name, (array, usual) in zip(
                [*rows, "spoilt", "weights"], pairs, strict=True
            )
            for index, step in np.argwhere(array != usual)
        ]
        return f"usual numbers but for {', '.join(unusual) or 'nothing'}"


def rounded(number):
    with np.errstate(all="ignore"):
        return float(np.float32(number).astype(jnp.bfloat16))


SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf),
    *(1 - 2**-24, 1 + 2**-23),
    *(1e-45, -1e-45, 1e-40, 2**-126, 1e-30, 1e30, 3e38, -3e38),
    *(0.1, 0.3, 1.01, rounded(0.1), rounded(0.3), rounded(1.01)),
)
NUMBERS = st.one_of(
    st.sampled_from(SPECIAL), st.floats(width=32), st.floats(width=32).map(rounded)
)


def usual_script() -> Script:
    """No signal is above the limit."""
    numbers = np.zeros((3, REPLICAS, STEPS), np.float32)
    numbers[LIMIT] = 1
    shape = REPLICAS, STEPS
    return Script(numbers, np.zeros(shape, np.float32), np.ones(shape, np.float32))


def one_by_one() -> Script:
    """Every replica is once the only one that requests a sync, by another number."""
    script = usual_script()
    numbers = (np.nan, np.inf, 1 + 2**-23, 3e38, -np.nan, 1.01, 2, 1e30)
    for index, number in enumerate(numbers):
        script.numbers[FIRST, index, 6 * index + 2] = number
    return script


PLACES = st.tuples(
    st.integers(0, 2), st.integers(0, REPLICAS - 1), st.integers(0, STEPS - 1)
)
POISON = (np.nan, np.inf, -np.inf)
LARGE = 1e6


@st.composite
def scripts(draw, spoilt=(), absent=False):
    """Mostly 0 for the signals and 1 for the limit; the rest are special numbers.

    Replicas that may be absent go and come again.
    """
    palette = np.float32([*SPECIAL, *draw(st.lists(NUMBERS, max_size=8))])
    often = draw(st.sampled_from([0.02, 0.1, 0.003, 1.0, 0.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers, spoilt_numbers, weights = usual_script()
    chosen = rng.choice(palette, numbers.shape)
    numbers = np.where(rng.random(numbers.shape) < often, chosen, numbers)
    for place, number in draw(st.lists(st.tuples(PLACES, NUMBERS), max_size=12)):
        numbers[place] = number
    if spoilt:
        share = draw(st.sampled_from([0.1, 0.5, 0.01, 0.95]))
        chosen = rng.choice(np.float32(spoilt), spoilt_numbers.shape)
        is_spoilt = rng.random(chosen.shape) < share
        spoilt_numbers = np.where(is_spoilt, chosen, spoilt_numbers)
    if absent:
        often = draw(st.sampled_from([0.05, 0.3, 0.9]))
        weights = np.logical_xor.accumulate(rng.random(weights.shape) < often, axis=1)
    return Script(numbers, spoilt_numbers, np.float32(weights))
