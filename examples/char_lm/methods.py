"""The methods that can be compared: a name, an optimizer, and the flags it reads.

Each is a preset of the library with the example's schedule.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import optax
from config import Config, UserError, flag
from jax.sharding import Mesh

import curvadion_jax as cd
from curvadion_jax.dimension_numbers import Partition

# Peaks. Those of Muon, AdamW and Dion were the best on models of a similar size, of
# local steps and of synchronous ones (benchmarks/study).
# Those of Lion and SGD are usual values and were not tuned.
_DION, _LOCAL_DION, _MUON, _LION, _ADAM, _SGD = 0.04, 0.08, 0.08, 0.001, 0.02, 0.1
_MOMENTUM = 0.9
_WARMUP, _FINAL = 0.05, 0.05


@dataclasses.dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        build: (configuration, mesh, partition) -> optimizer of rows. The partition says
            which parameters are matrices.
        reads: Fields of the configuration that not every method reads.
    """

    build: Callable[[Config, Mesh, Partition], optax.GradientTransformation]
    reads: frozenset[str] = frozenset()


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


def schedule(config: Config, default: float) -> optax.Schedule:
    """Linear warmup to the peak, `--learning-rate` or the default, and cosine decay."""
    peak = config.learning_rate or default
    warmup = max(1, round(_WARMUP * config.steps))
    steps = max(config.steps, warmup + 1)
    # The first step is not zero: it would be lost.
    return optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, steps, _FINAL * peak
    )


def local_muon(config: Config, **options: Any) -> optax.GradientTransformation:
    """`cd.local_muon` with the example's schedule and momentum."""
    rate = schedule(config, _MUON)
    return cd.local_muon(rate, momentum=_MOMENTUM, **options)


def _on(mesh: Mesh, partition: Partition) -> dict[str, Any]:
    return {"dimension_numbers": partition, "mesh": mesh}


def _curvadion(config: Config, mesh: Mesh, partition: Partition, **when: Any):
    # At full rank, its default: local steps send no factors, whatever their rank.
    rate = schedule(config, _LOCAL_DION)
    return cd.curvadion(rate, momentum=_MOMENTUM, **_on(mesh, partition), **when)


def _dion(config: Config, mesh: Mesh, partition: Partition) -> dict[str, Any]:
    return {
        "learning_rate": schedule(config, _DION),
        "rank": config.rank,
        "momentum": _MOMENTUM,
        **_on(mesh, partition),
    }


def _authors_code(
    config: Config, mesh: Mesh, partition: Partition
) -> optax.GradientTransformation:
    # A sign update is as long as AdamW's largest: Lion wants a smaller rate. It keeps
    # its proportion to that of the matrices.
    rate = schedule(config, _DION)
    scaled = lambda step: rate(step) * _LION / _DION
    return cd.presets.authors_code(
        threshold=config.threshold,
        other_optimizer=optax.lion(scaled, b1=0.95, b2=0.98, weight_decay=0.0),
        **_dion(config, mesh, partition),
    )


def _periodic(preset: Callable[..., Any], rate: float) -> Method:
    """A preset that synchronises every `sync_every` steps, and has no matrices."""
    return Method(
        lambda c, mesh, _: preset(schedule(c, rate), k=c.sync_every, mesh=mesh),
        frozenset({"sync_every"}),
    )


METHODS = {
    "local_muon": Method(
        lambda c, *on: local_muon(c, budget=c.budget, **_on(*on)),
        frozenset({"budget"}),
    ),
    "synchronous_adamw": Method(
        lambda c, mesh, _: cd.presets.synchronous_adamw(schedule(c, _ADAM), mesh=mesh)
    ),
    "synchronous_muon": Method(
        lambda c, *on: cd.presets.synchronous_muon(
            schedule(c, _MUON), momentum=_MOMENTUM, **_on(*on)
        )
    ),
    "curvadion": Method(
        lambda c, *on: _curvadion(c, *on, threshold=c.threshold),
        frozenset({"threshold"}),
    ),
    "curvadion_budget": Method(
        lambda c, *on: _curvadion(c, *on, budget=c.budget), frozenset({"budget"})
    ),
    "synchronous_dion": Method(
        lambda c, *on: cd.presets.synchronous_dion(**_dion(c, *on)),
        frozenset({"rank"}),
    ),
    "paper": Method(
        lambda c, *on: cd.presets.paper(threshold=c.threshold, **_dion(c, *on)),
        frozenset({"rank", "threshold"}),
    ),
    "authors_code": Method(_authors_code, frozenset({"rank", "threshold"})),
    "local_sgd": _periodic(cd.presets.local_sgd, _SGD),
    "diloco": _periodic(cd.presets.diloco, _ADAM),
    "muloco": Method(
        lambda c, *on: cd.presets.muloco(
            schedule(c, _MUON), k=c.sync_every, **_on(*on)
        ),
        frozenset({"sync_every"}),
    ),
}
