"""The methods that can be compared: a name, an optimizer, and the flags it reads.

Each is a preset of the library with the example's schedule.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import optax
from config import Config, UserError, flag

import curvadion_jax as cd

# Peaks. Those of synchronous Dion and of local steps of Dion and of Muon, and their
# momentum, were the best in benchmarks/communication, whose model is a little smaller.
# The others are usual values and were not tuned.
_DION, _LOCAL_DION, _MUON, _LION, _ADAM, _SGD = 0.04, 0.08, 0.08, 0.001, 0.005, 0.1
_MOMENTUM = 0.9
_WARMUP, _FINAL = 0.05, 0.05


@dataclasses.dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        build: (config, axis name) -> optimizer.
        reads: Fields of the configuration that not every method reads.
    """

    build: Callable[[Config, str], optax.GradientTransformation]
    reads: frozenset[str]


def check(names: Sequence[str], given: Collection[str]) -> None:
    """Reject an unknown method, and a flag that none of the methods would read.

    Args:
        names: Methods to train.
        given: Fields that were given on the command line.

    Raises:
        ValueError: with what to do instead.
    """
    for name in names:
        if name not in METHODS:
            raise UserError(
                f"--method: {name!r} is unknown; give some of {', '.join(METHODS)}"
            )
        if names.count(name) > 1:
            raise UserError(f"--method names {name} twice: name it once")
    for field in ("rank", "budget", "threshold", "sync_every"):
        readers = [name for name, method in METHODS.items() if field in method.reads]
        if field in given and not set(readers) & set(names):
            raise UserError(
                f"{flag(field)} has no effect on {', '.join(names)}; it belongs to "
                f"{', '.join(readers)}: leave it out, or train one of these"
            )


def _schedule(config: Config, default: float) -> optax.Schedule:
    """Linear warmup to the peak, `--learning-rate` or the default, and cosine decay."""
    peak = config.learning_rate or default
    warmup = max(1, round(_WARMUP * config.steps))
    steps = max(config.steps, warmup + 1)
    # The first step is not zero: it would be lost.
    return optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, steps, _FINAL * peak
    )


def _dion_arguments(config: Config) -> dict[str, Any]:
    """What every Dion method is given."""
    return {
        "learning_rate": _schedule(config, _DION),
        "rank": config.rank,
        "momentum": _MOMENTUM,
    }


def curvadion_arguments(config: Config) -> dict[str, Any]:
    """What `curvadion` is given in addition to its threshold or budget."""
    return {"learning_rate": _schedule(config, _LOCAL_DION), "momentum": _MOMENTUM}


def _curvadion(config: Config, axis: str) -> optax.GradientTransformation:
    # At full rank, its default: a low one is there to send little, and what it sends
    # are not factors.
    arguments = curvadion_arguments(config)
    return cd.curvadion(**arguments, threshold=config.threshold, axis_name=axis)


def _curvadion_budget(config: Config, axis: str) -> optax.GradientTransformation:
    arguments = curvadion_arguments(config)
    return cd.curvadion(**arguments, budget=config.budget, axis_name=axis)


def local_muon_arguments(config: Config) -> dict[str, Any]:
    """What `local_muon` is given in addition to its budget or trigger."""
    return {"learning_rate": _schedule(config, _MUON), "momentum": _MOMENTUM}


def _local_muon(config: Config, axis: str) -> optax.GradientTransformation:
    arguments = local_muon_arguments(config)
    return cd.local_muon(**arguments, budget=config.budget, axis_name=axis)


def _synchronous_dion(config: Config, axis: str) -> optax.GradientTransformation:
    return cd.presets.synchronous_dion(**_dion_arguments(config), axis_name=axis)


def _paper(config: Config, axis: str) -> optax.GradientTransformation:
    return cd.presets.paper(
        **_dion_arguments(config), threshold=config.threshold, axis_name=axis
    )


def _authors_code(config: Config, axis: str) -> optax.GradientTransformation:
    # A sign update is as long as AdamW's largest: Lion wants a smaller rate. It keeps
    # its proportion to that of the matrices.
    rate = _schedule(config, _DION)
    lion = optax.lion(
        lambda step: rate(step) * _LION / _DION,
        b1=0.95,
        b2=0.98,
        weight_decay=0.0,
    )
    return cd.presets.authors_code(
        **_dion_arguments(config),
        threshold=config.threshold,
        other_optimizer=lion,
        axis_name=axis,
    )


def _local_sgd(config: Config, axis: str) -> optax.GradientTransformation:
    rate = _schedule(config, _SGD)
    return cd.presets.local_sgd(rate, config.sync_every, axis_name=axis)


def _diloco(config: Config, axis: str) -> optax.GradientTransformation:
    rate = _schedule(config, _ADAM)
    return cd.presets.diloco(rate, config.sync_every, axis_name=axis)


def _muloco(config: Config, axis: str) -> optax.GradientTransformation:
    rate = _schedule(config, _MUON)
    return cd.presets.muloco(rate, config.sync_every, axis_name=axis)


METHODS = {
    "curvadion": Method(_curvadion, frozenset({"threshold"})),
    "curvadion_budget": Method(_curvadion_budget, frozenset({"budget"})),
    "local_muon": Method(_local_muon, frozenset({"budget"})),
    "synchronous_dion": Method(_synchronous_dion, frozenset({"rank"})),
    "paper": Method(_paper, frozenset({"rank", "threshold"})),
    "authors_code": Method(_authors_code, frozenset({"rank", "threshold"})),
    "local_sgd": Method(_local_sgd, frozenset({"sync_every"})),
    "diloco": Method(_diloco, frozenset({"sync_every"})),
    "muloco": Method(_muloco, frozenset({"sync_every"})),
}
