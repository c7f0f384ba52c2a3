"""From a run's texts to an optimizer, with the library's public parts and no others."""

from collections.abc import Callable
from typing import Any

import optax
from runs import Run, words

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS = "replica"
_WARMUP = 0.05


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
    trigger = triggers.any_of(
        _choose(_less_last(run, params), _TRIGGERS), _at_the_end(run.steps)
    )
    synchronizer = _synchronizer(run)
    if name == "local_muon":
        return _with_momentum(
            run,
            lambda momentum: cd.local_muon(
                rate,
                momentum=momentum,
                axis_name=AXIS,
                trigger=trigger,
                synchronizer=synchronizer,
                mu_dtype=run.state,
            ),
        )
    return cd.adaptive_sync(_inner(run, rate, params), trigger, synchronizer, AXIS)


def schedule(run: Run) -> optax.Schedule:
    """The learning rate of a run: a linear warmup, and cosine decay."""
    peak, warmup = run.learning_rate, round(_WARMUP * run.steps)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, run.steps, peak * run.final
    )


def _with_momentum(
    run: Run, make: Callable[[Any], optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that is made of a decay rate, where that changes over the run."""
    if run.last_momentum is None:
        return optax.with_extra_args_support(make(run.momentum))
    rising = optax.linear_schedule(run.momentum, run.last_momentum, run.steps)
    return optax.inject_hyperparams(make)(momentum=rising)


def _inner(
    run: Run, rate: optax.Schedule, params: optax.Params
) -> optax.GradientTransformation:
    name, numbers = words(run.inner)
    if name in ("dion", "curvadion"):
        return _with_momentum(
            run, lambda momentum: cd.dion(rate, *numbers, momentum=momentum)
        )
    if name == "muon":
        matrices = cd.default_dimension_numbers(params)
        return _with_momentum(
            run,
            lambda momentum: optax.contrib.muon(
                rate,
                beta=momentum,
                adam_b2=0.95,
                adam_learning_rate=rate,
                muon_weight_dimension_numbers=matrices,
            ),
        )
    if name == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    raise ValueError(f"no inner optimizer {run.inner!r}")


def _less_last(run: Run, params: optax.Params) -> str:
    """The trigger's text; what the forced last sync costs is taken from its share."""
    name, numbers = words(run.trigger)
    if name not in ("evenly", "budget"):
        return run.trigger
    form = _choose(run.compressor, _COMPRESSORS) or compressors.exact()
    whole = compressors.exact().payload(params).averaged * run.steps
    cost = form.payload(params).as_averaged(run.replicas) / whole
    return " ".join([name, f"{numbers[0] - cost:.8f}", *map(str, numbers[1:])])


def _at_the_end(steps: int) -> triggers.Trigger:
    return triggers.Trigger(lambda *_: (), None, lambda step, _: step == steps - 1)


def _choose(text: str, known: dict[str, Callable[..., Any]]) -> Any:
    name, numbers = words(text)
    if name not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return known[name](*numbers)


def _spending(share: float, *bounds: float) -> triggers.Trigger:
    bounds = dict(zip(("ahead", "behind"), bounds, strict=False))
    return triggers.budget(share, triggers.relative_momentum_change(0.3), **bounds)


_TRIGGERS = {
    "always": triggers.always,
    "every": triggers.every_k,
    "evenly": triggers.evenly,
    "budget": _spending,
    "rmmc": triggers.relative_momentum_change,
}
_COMPRESSORS = {"exact": lambda: None, "int": compressors.quantize}


def _synchronizer(run: Run) -> synchronizers.Synchronizer:
    compressor = _choose(run.compressor, _COMPRESSORS)
    if run.sync == "gradients":
        return synchronizers.average_gradients(compressor)
    if run.sync == "factors":
        return synchronizers.average_factors()
    if run.sync == "reconcile":
        outers = {
            "mean": lambda: None,
            "nesterov": lambda rate, decay: optax.sgd(
                rate, decay, nesterov=True, accumulator_dtype=run.state
            ),
        }
        return synchronizers.reconcile(
            _choose(run.outer, outers),
            compressor=compressor,
            residual_dtype=run.state if compressor else None,
        )
    raise ValueError(f"no synchronizer {run.sync!r}")
