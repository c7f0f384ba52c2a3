"""What synchronizers share.

There are two kinds. *Within the step*, `average_gradients` and `average_factors`
average what the inner optimizer works on; with `always` they equal training on one
big batch. *After the step*, `reconcile` lets every replica take its own step and then
brings the results together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _finite, _paths
from curvadion_jax._dion import DionState
from curvadion_jax._local_step import LocalStep
from curvadion_jax._matrices import MatrixView
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._protocols import Group, Measured, Synchronizer, SyncState, Views
from curvadion_jax.compressors import Compressor


def check_synchronizer(synchronizer: Any) -> None:
    """Rejects what is not a Synchronizer, and a cycle with a gap in its variants."""
    if not isinstance(synchronizer, Synchronizer):
        raise TypeError(
            "synchronizer must be a curvadion_jax.synchronizers.Synchronizer such as "
            f"reconcile(), got {synchronizer!r}"
        )
    cycle = synchronizer.cycle
    ints = isinstance(cycle, tuple) and all(type(variant) is int for variant in cycle)
    if not ints or set(cycle) != set(range(max(cycle, default=0) + 1)):
        raise ValueError(
            "cycle must be a tuple of ints that names every variant from 0 on, such as "
            f"(0, 0, 1), got {cycle!r}"
        )
    _arguments.check_int(synchronizer.delay, "a synchronizer's delay", at_least=0)
    if synchronizer.delay and not synchronizer.after_local_step:
        raise ValueError(
            f"a synchronizer with delay={synchronizer.delay} keeps what replicas do "
            "meanwhile: it needs after_local_step=True"
        )


def initial_state(
    synchronizer: Synchronizer, params: optax.Params, inner_state: Any, views: Views
) -> SyncState:
    """The sync state before the first step, with what a delay needs."""
    state = synchronizer.init(params, inner_state, views)
    if synchronizer.delay and not isinstance(state.own, Measured):
        raise TypeError(
            f"a synchronizer with delay={synchronizer.delay} needs its SyncState's own "
            "to be synchronizers.Measured.initial(params), in which replicas note what "
            f"they bring; its init gave {type(state.own).__name__}"
        )
    return state


def variants(
    synchronizer: Synchronizer,
) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """`sync` and `payload` of every variant, without the variant as an argument."""
    number = max(synchronizer.cycle) + 1
    last = [()] if number == 1 else [(variant,) for variant in range(number)]

    def of(function, variant):
        return lambda *arguments: function(*arguments, *variant)

    return [(of(synchronizer.sync, v), of(synchronizer.payload, v)) for v in last]


def zero_residual(params: optax.Params, dtype: Any = None) -> Any:
    """Nothing owed yet: zeros like the parameters; None is at least float32."""
    return jax.tree.map(
        lambda x: jnp.zeros_like(x, dtype or compute_dtype(x.dtype)), params
    )


def mean_with_feedback(
    compressor: Compressor,
    tree: Any,
    residual: Any,
    state: Any,
    local: LocalStep,
    group: Group,
) -> tuple[Any, Any, Any]:
    """Mean in a compressor's form of what replicas have and of what they owe.

    Residuals are of arrays times their weight: what a replica owed at one weight it
    pays in full at any other. One that takes no part brings that alone, and so what it
    owed need not be kept beside what it owes then: a copy of the parameters less. The
    mean is over all who are expected, and not over those who are there: else the drift
    of a replica that comes every second time, with two at once, would count twice.

    Args:
      compressor: see `Compressor`.
      tree: arrays of this replica.
      residual: what it owes.
      state: of the compressor.
      local: its part in the sync.
      group: the replicas.

    Returns:
      The mean, the residual and the compressor's state.
    """
    whole = jax.tree.map(
        lambda x, r: x * jnp.asarray(local.expected, x.dtype) + r,
        local.weighted(tree),
        local.finite(residual),
    )
    result = compressor.average(whole, state, group, local.views)
    unsent = jax.tree.map(lambda new, r: new.astype(r.dtype), result.unsent, residual)
    return result.mean, unsent, result.state


def with_absent(local: LocalStep, residual: Any, before: Any, tree: Any) -> Any:
    """What a replica owes after a mean of gradients, which it takes once.

    One that is absent owes its own. Where nobody is there the mean is not used, and all
    is owed still.

    Args:
      local: its part in the sync.
      residual: what `mean_with_feedback` returned.
      before: what it was given.
      tree: the gradients.
    """
    owed = _finite.where(local.anybody, residual, local.finite(before))
    later = _finite.or_zeros(~local.present, tree)
    return jax.tree.map(lambda r, x: r + x.astype(r.dtype), owed, later)


def own_unsent(local: LocalStep, unsent: Any) -> Any:
    """What a replica did not send of its own arrays, for those that keep it themselves.

    `unsent` is of arrays times their weight. A replica that counts little, or nothing,
    gets it back as one that counts like the others: it holds what rounding has lost of
    the mean, too, which must not come back many times.
    """
    weight = jnp.maximum(jnp.asarray(local.weight), 1 / jnp.asarray(local.expected))
    return jax.tree.map(lambda x: x / weight.astype(x.dtype), unsent)


def matrices(state: DionState, views: Views) -> dict[str, tuple[MatrixView, int]]:
    """Path -> view and rank of every matrix of a Dion, in the order of its leaves.

    Raises:
      ValueError: if that Dion sees a parameter otherwise than the views say.
    """
    found = {}
    for name, q in _paths.leaves_with_path(state.q):
        view = views.get(name)
        if view is None or (*view.batch, view.cols) != q.shape[:-1]:
            raise ValueError(
                f"Dion sees the parameter {name!r} otherwise than adaptive_sync does "
                f"(Q of shape {q.shape}, {view}): pass adaptive_sync the same "
                "dimension_numbers"
            )
        found[name] = (view, q.shape[-1])
    return found
