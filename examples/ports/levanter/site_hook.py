"""What joins a Levanter run to others: a config, and a hook after each step.

Copy it into your code. It reads nothing of Levanter but what `Trainer.add_hook` hands
to a hook, so `tests/sites/test_levanter_hook.py` runs it in a loop of a few lines.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import optax

import curvadion_jax as cd


@dataclasses.dataclass(frozen=True)
class SiteConfig:
    """The arguments of `cd.sites.Site`, for YAML and the command line.

    Attributes:
      run: URL or folder of the run.
      name: of this site. No two may have the same.
      bits: per element of what a site contributes; give 2 with Muon. None sends
        float32.
      outer_momentum: of a Nesterov step along the mean; 0 is plain averaging.
      every, quorum, grace, max_lag, poll: as for `cd.sites.Site`.
    """

    run: str
    name: str
    every: int = 30
    bits: int | None = 4
    outer_momentum: float = 0.0
    quorum: int = 1
    grace: float = 30.0
    max_lag: int | None = None
    poll: float = 1.0

    def site(self) -> cd.sites.Site:
        outer, momentum = None, self.outer_momentum
        if momentum:
            outer = optax.sgd(1.0, momentum=momentum, nesterov=True)
        return cd.sites.Site(
            self.run,
            self.name,
            every=self.every,
            outer=outer,
            compressor=cd.compressors.quantize(self.bits) if self.bits else None,
            quorum=self.quorum,
            grace=self.grace,
            max_lag=self.max_lag,
            poll=self.poll,
        )


class SiteHook:
    """Syncs after each step, and leaves the run after the last one.

    Make it the first hook of a trainer: a checkpoint then holds what training continues
    with, and the last one the run's model.

    Args:
      site: that has not started.
      tokens: of a step, from its number.
      log: takes metrics and a step, as `levanter.tracker.log` does.
    """

    def __init__(
        self,
        site: cd.sites.Site,
        tokens: Callable[[int], float],
        log: Callable[..., None] = lambda metrics, *, step: None,
    ) -> None:
        self._site, self._tokens, self._log = site, tokens, log

    def start(self, state: Any) -> Any:
        """A trainer's state, new or restored, with the run's parameters."""
        return _with_trained(state, self._site.start(state.trainable_model))

    def __call__(self, info: Any, force: bool = False) -> None:
        """After each step, and forced once after the last, which has had its own."""
        trained = info.state.trainable_model
        if force:
            trained = self._site.leave(trained)
        else:
            trained = self._site.sync(trained, self._tokens(info.step))
        info.state = _with_trained(info.state, trained)
        self._log(self.metrics(), step=info.step)

    def metrics(self) -> Mapping[str, float]:
        """Watch `missed`: a site that no round counts trains alone."""
        return {f"site/{x}": y for x, y in self._site.metrics._asdict().items()}


def _with_trained(state: Any, trained: Any) -> Any:
    model = eqx.combine(trained, state.model)  # with what is not trained
    return dataclasses.replace(state, model=model)
