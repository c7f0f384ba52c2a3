"""When what was received may be used.

Of several messages that depend on each other XLA starts the first at once and waits for
it, and lets computation go on during the last alone, though all of it depends on none.
(`benchmarks/tpu/overlap.py`: of a sync in 2 bits, which takes three, it waited for two
in front of the local steps.) So each but the last waits for some of these steps, and
XLA has computation to put before the use.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_gates: contextvars.ContextVar[Sequence[jax.Array]] = contextvars.ContextVar(
    "gates", default=()
)


def gates() -> Sequence[jax.Array]:
    """What `gating` was given."""
    return _gates.get()


@contextlib.contextmanager
def gating(arrays: Sequence[jax.Array]) -> Iterator[None]:
    """Lets `after` know zeros made of local steps, those of earlier ones first.

    An `optimization_barrier` would do as well, if it were there when XLA orders the
    program.
    """
    token = _gates.set(arrays)
    try:
        yield
    finally:
        _gates.reset(token)


def after(received: Any, stage: int) -> Any:
    """What was received in a stage of a sync, once so many local steps are taken."""
    if stage >= len(gates()):
        return received

    def later(x):
        zero = gates()[stage].astype(x.dtype)
        return x * (1 + zero) if jnp.issubdtype(x.dtype, jnp.floating) else x + zero

    return jax.tree.map(later, received)
