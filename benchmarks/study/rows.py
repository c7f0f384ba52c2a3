"""The rows of the study: from learning rate, steps and parameters to an optimizer.

All come from the library's public functions, as a reader of their pages would call
them. What a row says of a method is what is written here; other arguments are defaults.
"""

from collections.abc import Callable

import measuring
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = "replica"


def _synchronous(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    always, mean = triggers.always(), synchronizers.average_gradients()
    return cd.adaptive_sync(optimizer, always, mean, AXIS)


def _muon(rate, params, momentum=0.95):
    return measuring.muon(rate, params, beta=momentum, adam_b2=0.95)


def _rising_muon(rate, steps, params):
    make = optax.inject_hyperparams(lambda momentum: _muon(rate, params, momentum))
    return _synchronous(make(momentum=_rising(steps)))


def _rising(steps):
    return optax.linear_schedule(0.8, 0.95, steps)


Method = Callable[[optax.Schedule, int, optax.Params], optax.GradientTransformation]
MUON, LOCAL_MUON = "Muon, synchronous", "`local_muon`"
DION, CURVADION = "Dion, synchronous", "`curvadion(budget=0.01)`"
ADAMW, THRESHOLD = "AdamW, synchronous", "`curvadion(threshold=0.3)`"
RISING = ", momentum from 0.8 to 0.95"
METHODS: dict[str, Method] = {
    MUON: lambda rate, _, params: _synchronous(_muon(rate, params)),
    MUON + ", momentum 0.9": lambda rate, _, p: _synchronous(_muon(rate, p, 0.9)),
    MUON + RISING: _rising_muon,
    DION: lambda rate, *_: cd.presets.synchronous_dion(rate, rank=1.0, axis_name=AXIS),
    DION + ", rank 1/4": lambda rate, *_: cd.presets.synchronous_dion(
        rate, rank=0.25, axis_name=AXIS
    ),
    ADAMW: lambda rate, *_: _synchronous(optax.adamw(rate, 0.9, 0.95, weight_decay=0)),
    LOCAL_MUON: lambda rate, *_: cd.local_muon(rate, budget=0.01, axis_name=AXIS),
    LOCAL_MUON + RISING: lambda rate, steps, _: cd.local_muon(
        rate, budget=0.01, momentum=_rising(steps), axis_name=AXIS
    ),
    CURVADION: lambda rate, *_: cd.curvadion(rate, budget=0.01, axis_name=AXIS),
    THRESHOLD: lambda rate, *_: cd.curvadion(rate, threshold=0.3, axis_name=AXIS),
    "MuLoCo": lambda rate, *_: cd.presets.muloco(rate, axis_name=AXIS),
    "MuLoCo, 2 bits": lambda rate, *_: cd.local_muon(
        rate,
        budget=0.01,
        momentum=0.95,
        synchronizer=synchronizers.reconcile(
            optax.sgd(0.7, 0.6, nesterov=True), compressor=cd.compressors.quantize(2)
        ),
        axis_name=AXIS,
    ),
    "DiLoCo": lambda rate, *_: cd.presets.diloco(rate, axis_name=AXIS),
}
# The learning rates that are tried first, and whose best one a method takes.
_LARGE, _SMALL = (0.02, 0.04, 0.08, 0.16), (0.0025, 0.005, 0.01, 0.02)
RATES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys((MUON, LOCAL_MUON, CURVADION, DION, "MuLoCo"), _LARGE),
    **dict.fromkeys((ADAMW, "DiLoCo"), _SMALL),
}
SAME_RATE = {
    MUON + ", momentum 0.9": MUON,
    MUON + RISING: MUON,
    DION + ", rank 1/4": DION,
    LOCAL_MUON + RISING: LOCAL_MUON,
    THRESHOLD: CURVADION,
    "MuLoCo, 2 bits": LOCAL_MUON,
}
