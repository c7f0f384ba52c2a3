"""Programs of a sync, or of a local step, without the condition that chooses.

For benchmarks and tests, which measure the two apart. Who writes a training loop gives
`triggers.always()` or `triggers.never()` where a method takes a trigger: their answers
are known to the host too.
"""

import dataclasses
from typing import Any

import optax


def when(
    tx: optax.GradientTransformationExtraArgs, due: bool | None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with a decision due on every step, or on none.

    Args:
      tx: from `adaptive_sync`, or a method made of it.
      due: known when the step is traced. False is the program of a local step; True
        that of a sync, if the trigger measures nothing, else with a vote in front. None
        leaves the optimizer as it is.

    Example:
      >>> import jax
      >>> import curvadion_jax as cd
      >>> tx = when(cd.presets.local_sgd(0.1, k=100), True)
      >>> params = {"w": jax.numpy.ones(2)}
      >>> int(tx.update(params, tx.init(params), params)[1].counters.syncs)
      1
    """
    if due is None:
        return tx
    # `adaptive_sync` returns methods of its `_AdaptiveSync`.
    update: Any = tx.update
    optimizer = update.__self__
    trigger = optimizer.trigger._replace(due=lambda clock: due)
    return tx._replace(update=dataclasses.replace(optimizer, trigger=trigger).update)
