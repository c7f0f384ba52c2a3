"""Published methods as points in one space: inner optimizer, trigger, synchronizer.

Each is a few lines of the public parts, to be read as much as called, and returns an
optimizer like :func:`curvadion`. All learning rates may be schedules. What is out of
range or of the wrong kind is rejected, with what must be in its place.
"""

from curvadion_jax.presets._local_steps import diloco, local_sgd, muloco
from curvadion_jax.presets._published_curvadion import authors_code, paper
from curvadion_jax.presets._synchronous import synchronous_dion

__all__ = [
    "authors_code",
    "diloco",
    "local_sgd",
    "muloco",
    "paper",
    "synchronous_dion",
]
