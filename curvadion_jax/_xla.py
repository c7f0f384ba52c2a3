"""What is done for XLA's sake alone.

A conditional in which a branch hands arrays through copies much of them, donated or not
(https://github.com/jax-ml/jax/issues/39449). A loop that does not run leaves what goes
through it where it is: with `run_once` in place of a `lax.cond` a local step of
`reconcile` over 2 replicas of 10.5 million parameters copies no anchor, error or outer
momentum (`benchmarks/overhead.py`; `tests/` assert it on the compiled program).

With `where(anybody, new, old)` all old parameters, errors and momenta stay in memory
until the new ones are there: `if_any` is a conditional (`benchmarks/memory.py --peak`:
temporary memory of a sync 6.0 to 2.25 times the parameters, this and the pieces of
`quantize`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _collectives, _guards
from curvadion_jax._jax_internals import trace


def run_once(
    fire: jax.Array | bool,
    sync: Callable[..., Any],
    done: Any,
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """What a local step has done, or what a sync makes of it; cannot hang.

    A loop of one pass or none. The conditional inside keeps XLA from computing in front
    of the loop what a sync needs and no pass changes.

    Args:
      fire: bool[], the same on all replicas, whether to synchronise. A Python bool is
        known, and needs no loop.
      sync: function of `done` and the operands that may communicate over the axis.
      done: tree of arrays.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.

    Returns:
      A tree like `done`, marked as varying over the axis.

    Raises:
      ValueError: as `_guards.cond`.
    """
    done = _collectives.vary(done, axis_name)
    keep = lambda done, *_: done  # noqa: E731
    if isinstance(fire, bool):
        return _guards.cond(fire, sync, keep, done, *operands, axis_name=axis_name)
    _guards.require_shared(fire, axis_name)
    branches = [trace(each, done, *operands) for each in (sync, keep)]
    axes = _guards.axes_of_results(branches)
    if axes != _guards.axes_of_results(branches[1:]):
        # A loop hands on what it began with, and marked as what it ends with.
        done = _collectives.vary_over(done, axes)
        branches = [trace(each, done, *operands) for each in (sync, keep)]

    def once(_, done):
        return _guards.cond(fire, *branches, done, *operands, axis_name=axis_name)

    return lax.fori_loop(0, fire.astype(jnp.int32), once, done)


def if_any(
    anybody: jax.Array,
    function: Callable[..., tuple[Any, ...]],
    *before: Any,
    axis_name: str | None,
) -> tuple[Any, ...]:
    """What a function makes of trees, or the trees as they are if nobody takes part."""
    keep = lambda *before: before  # noqa: E731
    return _guards.cond(anybody, function, keep, *before, axis_name=axis_name)
