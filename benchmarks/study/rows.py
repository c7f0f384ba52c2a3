"""The rows of the study: from learning rate, steps and replicas to an optimizer.

All come from the library's public functions, as a reader of their pages would call
them. What a row says of a method is what is written here; other arguments are defaults.
`baselines.py` has the two that are no method of the library.
"""

from collections.abc import Callable
from typing import Any

import baselines
import measuring
import optax

import curvadion_jax as cd
from curvadion_jax import compressors, presets, synchronizers


def rising(steps: int) -> optax.Schedule:
    """The momentum of the best Muon, from 0.8 to 0.95."""
    return optax.linear_schedule(0.8, 0.95, steps)


def matrices(mesh: Any) -> dict[str, Any]:
    """What every method with Muon or Dion is given."""
    return {"dimension_numbers": measuring.matrices, "mesh": mesh}


def _in_two_bits(
    rate: optax.Schedule, mesh: Any, outer_rate: float, outer_momentum: float
) -> optax.GradientTransformation:
    """MuLoCo within the budget: `local_muon` with MuLoCo's momentum and outer step."""
    outer = optax.sgd(outer_rate, outer_momentum, nesterov=True)
    two_bits = compressors.quantize(2)
    synchronizer = synchronizers.reconcile(outer, compressor=two_bits)
    return cd.local_muon(
        rate, budget=0.01, momentum=0.95, synchronizer=synchronizer, **matrices(mesh)
    )


Method = Callable[[optax.Schedule, int, Any], optax.GradientTransformation]
MUON, LOCAL_MUON = "Muon, synchronous", "`local_muon`"
DION, CURVADION = "Dion, synchronous", "`curvadion(budget=0.01)`"
ADAMW, THRESHOLD = "AdamW, synchronous", "`curvadion(threshold=0.3)`"
DILOCO, MULOCO = "DiLoCo", "MuLoCo"
RISING = ", momentum from 0.8 to 0.95"
BEST_MUON = MUON + RISING
LARGE_BATCH = "Muon, batches of 7 steps, 2 bits"
TWO_BITS = MUON + RISING + ", 2 bits"
# The values of its authors' files for several workers; the preset has one worker's.
FOR_EIGHT = ", outer step 0.9, 0.8"
OUTER = " and an outer step"
METHODS: dict[str, Method] = {
    MUON: lambda rate, _, mesh: presets.synchronous_muon(rate, **matrices(mesh)),
    MUON + ", momentum 0.9": lambda rate, _, mesh: presets.synchronous_muon(
        rate, momentum=0.9, **matrices(mesh)
    ),
    BEST_MUON: lambda rate, steps, mesh: presets.synchronous_muon(
        rate, momentum=rising(steps), **matrices(mesh)
    ),
    BEST_MUON + OUTER: lambda rate, steps, mesh: optax.chain(
        presets.synchronous_muon(rate, momentum=rising(steps), **matrices(mesh)),
        cd.replicas.lift(baselines.outer_nesterov(6, 0.7, 0.6), mesh),
    ),
    LARGE_BATCH: lambda rate, steps, mesh: baselines.large_batch(
        *(lambda count: rate(7 * count), rising(steps // 7), 7, mesh)
    ),
    TWO_BITS: lambda rate, steps, mesh: presets.synchronous_muon(
        rate,
        momentum=rising(steps),
        compressor=compressors.quantize(2),
        **matrices(mesh),
    ),
    DION: lambda rate, _, mesh: presets.synchronous_dion(
        rate, rank=1.0, **matrices(mesh)
    ),
    DION + ", rank 1/4": lambda rate, _, mesh: presets.synchronous_dion(
        rate, rank=0.25, **matrices(mesh)
    ),
    ADAMW: lambda rate, _, mesh: presets.synchronous_adamw(rate, mesh=mesh),
    LOCAL_MUON: lambda rate, _, mesh: cd.local_muon(
        rate, budget=0.01, **matrices(mesh)
    ),
    LOCAL_MUON + RISING: lambda rate, steps, mesh: cd.local_muon(
        rate, budget=0.01, momentum=rising(steps), **matrices(mesh)
    ),
    CURVADION: lambda rate, _, mesh: cd.curvadion(rate, budget=0.01, **matrices(mesh)),
    THRESHOLD: lambda rate, _, mesh: cd.curvadion(
        rate, threshold=0.3, **matrices(mesh)
    ),
    MULOCO: lambda rate, _, mesh: presets.muloco(rate, **matrices(mesh)),
    MULOCO + FOR_EIGHT: lambda rate, _, mesh: presets.muloco(
        rate, outer_learning_rate=0.9, outer_momentum=0.8, **matrices(mesh)
    ),
    MULOCO + ", 2 bits": lambda rate, _, mesh: _in_two_bits(rate, mesh, 0.7, 0.6),
    MULOCO + FOR_EIGHT + ", 2 bits": lambda rate, _, mesh: _in_two_bits(
        rate, mesh, 0.9, 0.8
    ),
    DILOCO: lambda rate, _, mesh: presets.diloco(rate, mesh=mesh),
}
# The learning rates that are tried first, and whose best one a method takes.
_LARGE, _SMALL = (0.02, 0.04, 0.08, 0.16), (0.0025, 0.005, 0.01, 0.02)
RATES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys((MUON, LOCAL_MUON, CURVADION, DION, MULOCO, LARGE_BATCH), _LARGE),
    **dict.fromkeys((ADAMW, DILOCO), _SMALL),
}
# Others are compared with these, so their two best rates after a quarter of the steps
# train all of them on all seeds, and the lower mean is the zero.
COMPARED_WITH = (BEST_MUON, ADAMW)
SAME_RATE = {
    MUON + ", momentum 0.9": MUON,
    BEST_MUON: MUON,
    BEST_MUON + OUTER: MUON,
    TWO_BITS: MUON,
    DION + ", rank 1/4": DION,
    LOCAL_MUON + RISING: LOCAL_MUON,
    THRESHOLD: CURVADION,
    MULOCO + FOR_EIGHT: MULOCO,
    MULOCO + ", 2 bits": LOCAL_MUON,
    MULOCO + FOR_EIGHT + ", 2 bits": LOCAL_MUON,
}
