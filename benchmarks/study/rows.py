"""The rows of the study: from learning rate, steps and parameters to an optimizer.

All come from the library's public functions, as a reader of their pages would call
them. What a row says of a method is what is written here; other arguments are defaults.
"""

from collections.abc import Callable

import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = "replica"


def _synchronous(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    always, mean = triggers.always(), synchronizers.average_gradients()
    return cd.adaptive_sync(optimizer, always, mean, AXIS)


def _adamw(rate, steps, params):
    return _synchronous(optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0))


def _muon(rate, steps, params):
    return _synchronous(_muon_with(0.95, rate, params))


def _muon_with(momentum, rate, params):
    return optax.contrib.muon(
        rate,
        beta=momentum,
        adam_b2=0.95,
        muon_weight_dimension_numbers=cd.default_dimension_numbers(params),
    )


def _muon_as_local(rate, steps, params):
    return _synchronous(_muon_with(0.9, rate, params))


def _rising_muon(rate, steps, params):
    make = optax.inject_hyperparams(lambda momentum: _muon_with(momentum, rate, params))
    return _synchronous(make(momentum=_rising_momentum(steps)))


def _rising_momentum(steps):
    return optax.linear_schedule(0.8, 0.95, steps)


def _dion(rate, steps, params):
    return cd.presets.synchronous_dion(rate, rank=1.0, axis_name=AXIS)


def _dion_of_a_quarter(rate, steps, params):
    return cd.presets.synchronous_dion(rate, rank=0.25, axis_name=AXIS)


def _local_muon(rate, steps, params):
    return cd.local_muon(rate, budget=0.01, axis_name=AXIS)


def _rising_local_muon(rate, steps, params):
    momentum = _rising_momentum(steps)
    return cd.local_muon(rate, budget=0.01, momentum=momentum, axis_name=AXIS)


def _budget(rate, steps, params):
    return cd.curvadion(rate, budget=0.01, axis_name=AXIS)


def _threshold(rate, steps, params):
    return cd.curvadion(rate, threshold=0.3, axis_name=AXIS)


def _diloco(rate, steps, params):
    return cd.presets.diloco(rate, axis_name=AXIS)


def _muloco(rate, steps, params):
    return cd.presets.muloco(rate, axis_name=AXIS)


Method = Callable[[optax.Schedule, int, optax.Params], optax.GradientTransformation]
MUON, LOCAL_MUON = "Muon, synchronous", "`local_muon`"
RISING = ", momentum from 0.8 to 0.95"
DION, CURVADION = "Dion, synchronous", "`curvadion(budget=0.01)`"
METHODS: dict[str, Method] = {
    MUON: _muon,
    MUON + ", momentum 0.9": _muon_as_local,
    MUON + RISING: _rising_muon,
    DION: _dion,
    "Dion, synchronous, rank 1/4": _dion_of_a_quarter,
    "AdamW, synchronous": _adamw,
    LOCAL_MUON: _local_muon,
    LOCAL_MUON + RISING: _rising_local_muon,
    CURVADION: _budget,
    "`curvadion(threshold=0.3)`": _threshold,
    "MuLoCo": _muloco,
    "DiLoCo": _diloco,
}
# The learning rates that are tried first, and whose best one a method takes.
RATES: dict[str, tuple[float, ...]] = {
    MUON: (0.02, 0.04, 0.08),
    LOCAL_MUON: (0.02, 0.04, 0.08),
    CURVADION: (0.02, 0.04, 0.08),
    DION: (0.02, 0.04, 0.08),
    "MuLoCo": (0.02, 0.04, 0.08),
    "AdamW, synchronous": (0.005, 0.01, 0.02),
    "DiLoCo": (0.005, 0.01, 0.02),
}
SAME_RATE = {
    "Dion, synchronous, rank 1/4": DION,
    MUON + ", momentum 0.9": MUON,
    MUON + RISING: MUON,
    LOCAL_MUON + RISING: LOCAL_MUON,
    "`curvadion(threshold=0.3)`": CURVADION,
}
