"""From a run's texts to an optimizer, with the library's public parts and no others."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from runs import Run, words
from turns import turn

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
    known = _TRIGGERS | {
        "quadratic": lambda alpha: triggers.quadratic_period(
            rate, alpha, warmup=round(_WARMUP * run.steps)
        ),
        "weighted": lambda share, power: _at(_spread(run, params, share, power)),
        "warm": lambda share, steps: _at(_spread(run, params, share, 0.0, steps)),
    }
    last = triggers.stateless(
        lambda seen: triggers.decision(seen.steps == run.steps - 1 - run.delay),
        scheduled=True,
    )
    trigger = triggers.any_of(_choose(_less_last(run, params), known), last)
    synchronizer = _synchronizer(run, params)
    # What stored results call 'curvadion' is `local_muon`, its default then.
    if name in ("local_muon", "curvadion") and not numbers:
        local = _with_momentum(
            run,
            lambda momentum: cd.local_muon(
                rate,
                momentum=momentum,
                axis_name=AXIS,
                trigger=trigger,
                synchronizer=synchronizer,
                adam_learning_rate=lambda count: run.other_rate * rate(count),
                mu_dtype=run.state,
            ),
        )
        if run.averaged == "none":
            return local
        return optax.chain(_averaged(run, params), local)
    inner = _inner(run, rate, params)
    return cd.adaptive_sync(inner, trigger, synchronizer, AXIS)


def schedule(run: Run) -> optax.Schedule:
    """The learning rate of a run: a linear warmup, and cosine decay."""
    peak, warmup = run.learning_rate, round(_WARMUP * run.steps)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, run.steps, peak * run.final
    )


def _averaged(run: Run, params: optax.Params) -> optax.GradientTransformation:
    """Averages the gradients of some parameters on every step."""
    if run.averaged not in ("matrices", "others"):
        raise ValueError(f"no parameters {run.averaged!r}")
    numbers = cd.default_dimension_numbers(params)
    wanted = jax.tree.map(
        lambda _, found: (found is not None) == (run.averaged == "matrices"),
        params,
        numbers,
    )
    mean = optax.stateless(lambda gradients, _: jax.lax.pmean(gradients, AXIS))
    return optax.masked(mean, wanted)


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
            run,
            lambda momentum: cd.dion(
                rate,
                *numbers,
                momentum=momentum,
                adam_learning_rate=lambda count: run.other_rate * rate(count),
            ),
        )
    if name == "muon":
        numbers = cd.default_dimension_numbers(params)
        return _with_momentum(
            run,
            lambda momentum: optax.contrib.muon(
                rate,
                beta=momentum,
                adam_b2=0.95,
                adam_learning_rate=lambda count: run.other_rate * rate(count),
                muon_weight_dimension_numbers=numbers,
            ),
        )
    if name == "adamw":
        return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0)
    if name == "sgd":
        return optax.sgd(rate, momentum=0.9)
    raise ValueError(f"no inner optimizer {run.inner!r}")


def _syncs(run: Run, params: optax.Params, share: float = 1.0) -> int:
    """How many syncs a share of the bytes of synchronous training pays for."""
    return int(share / _cost(run, params))


def _cost(run: Run, params: optax.Params) -> float:
    """What a sync costs, as a share of the bytes of synchronous training."""
    form = _choose(run.compressor, _COMPRESSORS) or compressors.exact()
    whole = compressors.exact().payload(params, {}).averaged * run.steps
    sent = form.payload(params, {}).as_averaged(run.replicas) / run.fragments
    return sent / whole


def _less_last(run: Run, params: optax.Params) -> str:
    """The trigger's text; what the forced last sync costs is taken from its share."""
    name, numbers = words(run.trigger)
    if name not in ("evenly", *_SIGNALS):
        return run.trigger
    left = numbers[0] - _cost(run, params)
    return " ".join([name, f"{left:.8f}", *map(str, numbers[1:])])


def _spread(
    run: Run, params: optax.Params, share: float, power: float, warm: int = 0
) -> np.ndarray:
    """Which steps synchronise: the first ones, and others by the learning rate.

    A step on which several are due takes one, and the others are lost.
    """
    syncs = _syncs(run, params, share)
    rates = np.asarray(schedule(run)(jnp.arange(run.steps)), np.float64)
    rates = np.maximum(rates, 1e-3 * rates.max())  # the first is zero
    due = np.cumsum(np.where(np.arange(run.steps) < warm, 0, rates**power))
    due *= (syncs - warm) / due[-1]
    wanted = np.floor(due * (1 + 1e-9)) > np.floor(np.append(0, due[:-1]) * (1 + 1e-9))
    wanted[:warm] = True
    return wanted


def _at(wanted: np.ndarray) -> triggers.Trigger:
    return triggers.stateless(
        lambda seen: triggers.decision(jnp.asarray(wanted)[seen.steps])
    )


def _choose(text: str, known: dict[str, Callable[..., Any]]) -> Any:
    name, numbers = words(text)
    if name not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return known[name](*numbers)


_COMPRESSORS = {
    "exact": lambda: None,
    "int": lambda bits, mean_bits=None, block=256: compressors.quantize(
        bits, block, mean_bits=mean_bits
    ),
}
_MOMENTA = _COMPRESSORS | {"none": lambda: False, "exact": lambda: True}


def _nesterov(
    rate: float, decay: float, *last: float, syncs: int, dtype: str
) -> optax.GradientTransformation:
    if not last:
        return optax.sgd(rate, decay, nesterov=True, accumulator_dtype=dtype)
    rates, decays = (
        optax.linear_schedule(start, end, syncs)
        for start, end in zip((rate, decay), last, strict=True)
    )
    return optax.inject_hyperparams(optax.sgd, static_args="nesterov")(
        rates, momentum=decays, nesterov=True
    )


def _outers(syncs: int, dtype: str) -> dict[str, Callable[..., Any]]:
    return {
        "mean": lambda: None,
        "nesterov": functools.partial(_nesterov, syncs=syncs, dtype=dtype),
    }


_CHANGE = 0.3
_SIGNALS = {
    "budget": triggers.relative_momentum_change(_CHANGE),
    "turn": turn(_CHANGE),
    "moved": triggers.drift(0.01),
}


def _spending(signal: triggers.Trigger) -> Callable[..., triggers.Trigger]:
    return lambda share, ahead=3, behind=3: triggers.budget(
        share, signal, ahead=ahead, behind=behind
    )


_TRIGGERS = {
    "always": triggers.always,
    "every": triggers.every_k,
    "evenly": triggers.evenly,
    **{name: _spending(signal) for name, signal in _SIGNALS.items()},
    "drift": triggers.drift,
    "rmmc": triggers.relative_momentum_change,
}


def _synchronizer(run: Run, params: optax.Params) -> synchronizers.Synchronizer:
    compressor = _choose(run.compressor, _COMPRESSORS)
    if run.sync == "gradients":
        return synchronizers.average_gradients(compressor)
    if run.sync == "factors":
        return synchronizers.average_factors(compressor)
    if run.sync == "reconcile":
        _, shares = words(run.trigger)
        return synchronizers.reconcile(
            _choose(run.outer, _outers(_syncs(run, params, *shares[:1]), run.state)),
            compressor=compressor,
            momentum=_choose(run.sent_momentum, _MOMENTA),
            residual_dtype=run.state if compressor else None,
            fragments=run.fragments,
            delay=run.delay,
        )
    raise ValueError(f"no synchronizer {run.sync!r}")
