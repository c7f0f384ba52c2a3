"""Syncs at other times than evenly, and of a part of the parameters in turn.

Neither is of the library: what they gain at equal bytes is what the study asks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rows

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers


def by_root_of_rate(
    rate: optax.Schedule, budget: float, steps: int
) -> triggers.Trigger:
    """Syncs as frequent as the root of the learning rate, as many as `evenly` has.

    A rule of the learning rate alone, as Gu et al.'s Quadratic Synchronization Rule
    (arXiv 2310.14423), whose period falls faster.
    """
    roots = np.sqrt([float(rate(step)) for step in range(steps)])
    spent = np.cumsum(budget * roots / roots.mean())

    def due(clock):
        syncs = np.floor(spent / clock.cost)
        return jnp.asarray(np.diff(syncs, prepend=0.0) > 0)[clock.steps]

    return triggers.Trigger(due)


def in_turn(fragments: int, whole: synchronizers.AfterStep) -> synchronizers.AfterStep:
    """A sync of every n-th array of the parameters, the next one of the next ones.

    As Streaming DiLoCo's fragments (arXiv 2501.18512), without overlap.
    """

    def sync(moved, anchor, state, residual, part):
        number, state = state
        old = moved, anchor, state, residual
        new = whole.sync(*old, part)

        def of_fragment(new, old):
            leaves, structure = jax.tree.flatten(new)
            pairs = zip(leaves, jax.tree.leaves(old), strict=True)
            return structure.unflatten(
                jnp.where(number % fragments == place % fragments, x, y)
                for place, (x, y) in enumerate(pairs)
            )

        target, anchor, state, residual = map(of_fragment, new, old)
        return target, anchor, (number + 1, state), residual

    def payload(*arguments):
        of_whole = whole.payload(*arguments)
        return compressors.Payload(of_whole.averaged // fragments)

    def init_state(anchor):
        return jnp.zeros((), jnp.int32), whole.init_state(anchor)

    return synchronizers.AfterStep(sync, payload, init_state, whole.init_residual)


def local_muon(
    rate: optax.Schedule,
    steps: int,
    mesh: Any,
    *,
    budget: float,
    fragments: int,
    by_rate: bool,
) -> optax.GradientTransformationExtraArgs:
    """`local_muon` with a rising momentum, and with one of them or with both."""
    outer = optax.sgd(1.0, 0.4, nesterov=True)
    whole = synchronizers.reconcile(outer, compressor=compressors.quantize(2))
    by_root = by_root_of_rate(rate, budget, steps)
    return cd.local_muon(
        rate,
        trigger=by_root if by_rate else triggers.evenly(budget),
        momentum=rows.rising(steps),
        synchronizer=in_turn(fragments, whole),
        **rows.matrices(mesh),
    )
