"""The optimizers whose quiet steps `overhead.py` times, and the bare local ones."""

from typing import Any, NamedTuple

import optax

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS = cd.replicas.AXIS
RATE = 0.01
# More than any value; a budget for less than one sync in all steps.
NEVER, LITTLE = 1e9, 1e-9
LARGE_STATE: dict[str, Any] = {
    "outer": optax.sgd(0.7, 0.9, nesterov=True),
    "compressor": compressors.quantize(4),
}


class Case(NamedTuple):
    """An optimizer, and the name of the local one that it is compared with."""

    optimizer: optax.GradientTransformation
    local: str
    scheduled: bool = False


def local_optimizers(params: dict) -> dict[str, optax.GradientTransformation]:
    """The bare ones, by name."""
    numbers = cd.default_dimension_numbers(params)
    return {
        "`dion`": cd.dion(RATE),
        # What `local_muon` runs.
        "Muon": optax.contrib.muon(RATE, muon_weight_dimension_numbers=numbers),
    }


def cases(local: dict[str, optax.GradientTransformation]) -> dict[str, Case]:
    """What the table has a row for: name -> optimizer."""
    change = triggers.relative_momentum_change(NEVER)
    asked = {
        "`every_k`": triggers.every_k(10**6),
        "`evenly`": triggers.evenly(LITTLE),
        "`relative_momentum_change`": change,
        "`budget(relative_momentum_change)`": triggers.budget(LITTLE, change),
        "`delayed(relative_momentum_change)`": triggers.delayed(change),
        "`drift`": triggers.drift(NEVER),
    }

    def of_dion(trigger, **options):
        plain = synchronizers.reconcile(**options)
        tx = cd.adaptive_sync(local["`dion`"], trigger, plain, AXIS)
        return Case(tx, "`dion`", trigger.scheduled)

    rows = {name: of_dion(trigger) for name, trigger in asked.items()}
    large = "`every_k`, error feedback and outer momentum"
    rows[large] = of_dion(asked["`every_k`"], **LARGE_STATE)
    rows["`local_muon`"] = Case(
        cd.local_muon(RATE, axis_name=AXIS, budget=LITTLE), "Muon", True
    )
    return rows
