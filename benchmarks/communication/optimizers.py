"""From a run's texts to an optimizer, with the library's public parts and no others."""

from collections.abc import Callable
from typing import Any

import optax
from runs import Run, words

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS = "replica"
_WARMUP, _FINAL = 0.05, 0.05


def optimizer(run: Run, params: optax.Params) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run, over the axis 'replica'.

    Args:
        run: What to build.
        params: Parameters of one replica, or their shapes.

    Raises:
        ValueError: a text is not one of those that `Run` lists.
    """
    name, numbers = words(run.inner)
    rate = schedule(run)
    if name in ("paper", "authors_code"):
        rank, threshold = numbers
        preset = getattr(cd.presets, name)
        return preset(rate, threshold, rank=rank, axis_name=AXIS)
    known = _TRIGGERS | {
        "quadratic": lambda alpha: triggers.quadratic_period(
            rate, alpha, warmup=round(_WARMUP * run.steps)
        )
    }
    last = triggers.stateless(
        lambda seen: triggers.decision(seen.steps == run.steps - 1)
    )
    trigger = triggers.any_of(_choose(_less_last(run, params), known), last)
    synchronizer = _synchronizer(run)
    # What stored results call 'curvadion' is `local_muon`, its default then.
    if name in ("local_muon", "curvadion") and not numbers:
        return cd.local_muon(
            rate,
            momentum=run.momentum,
            axis_name=AXIS,
            trigger=trigger,
            synchronizer=synchronizer,
        )
    inner = _inner(run, rate, params)
    return cd.adaptive_sync(inner, trigger, synchronizer, AXIS)


def schedule(run: Run) -> optax.Schedule:
    """The learning rate of a run: a linear warmup, and cosine decay to a twentieth."""
    peak, warmup = run.learning_rate, round(_WARMUP * run.steps)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, run.steps, peak * _FINAL
    )


def _inner(
    run: Run, rate: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    name, numbers = words(run.inner)
    if name in ("dion", "curvadion"):
        return cd.dion(rate, *numbers, momentum=run.momentum)
    if name == "muon":
        return optax.contrib.muon(
            rate,
            beta=run.momentum,
            adam_b2=0.95,
            muon_weight_dimension_numbers=cd.default_dimension_numbers(params),
        )
    if name == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    if name == "sgd":
        return optax.sgd(rate, momentum=0.9)
    raise ValueError(f"no inner optimizer {run.inner!r}")


def _less_last(run: Run, params: optax.Params) -> str:
    """The trigger's text; what the forced last sync costs is taken from its share."""
    name, numbers = words(run.trigger)
    if name not in ("evenly", "budget"):
        return run.trigger
    form = _choose(run.compressor, _COMPRESSORS) or compressors.exact()
    sync = form.payload(params, {}).as_averaged(run.replicas)
    every_step = compressors.exact().payload(params, {}).averaged * run.steps
    left = numbers[0] - sync / every_step
    return " ".join([name, f"{left:.8f}", *map(str, numbers[1:])])


def _choose(text: str, known: dict[str, Callable[..., Any]]) -> Any:
    name, numbers = words(text)
    if name not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return known[name](*numbers)


def _low_rank(rank: int | float, bits: int | None = None) -> compressors.Compressor:
    factors = compressors.low_rank(rank)
    if bits is None:
        return factors
    return compressors.chain(factors, compressors.quantize(bits))


_COMPRESSORS = {
    "exact": lambda: None,
    "int": lambda bits, mean_bits=None, block=256: compressors.quantize(
        bits, block, mean_bits=mean_bits
    ),
    "low_rank": _low_rank,
    "top_k": compressors.top_k,
}
_MOMENTA = _COMPRESSORS | {"none": lambda: False, "exact": lambda: True}
_OUTERS = {
    "mean": lambda: None,
    "nesterov": lambda rate, decay: optax.sgd(rate, decay, nesterov=True),
    "orthonormal": cd.outer.orthonormal,
}
_CHANGE = 0.3
_TRIGGERS = {
    "always": triggers.always,
    "every": triggers.every_k,
    "evenly": triggers.evenly,
    "budget": lambda share, ahead=3, behind=3: triggers.budget(
        share,
        triggers.relative_momentum_change(_CHANGE),
        ahead=ahead,
        behind=behind,
    ),
    "drift": triggers.drift,
    "rmmc": triggers.relative_momentum_change,
}


def _synchronizer(run: Run) -> synchronizers.Synchronizer:
    compressor = _choose(run.compressor, _COMPRESSORS)
    if run.sync == "gradients":
        return synchronizers.average_gradients(compressor)
    if run.sync == "factors":
        return synchronizers.average_factors(compressor)
    if run.sync == "reconcile":
        return synchronizers.reconcile(
            _choose(run.outer, _OUTERS),
            compressor=compressor,
            momentum=_choose(run.sent_momentum, _MOMENTA),
        )
    raise ValueError(f"no synchronizer {run.sync!r}")
