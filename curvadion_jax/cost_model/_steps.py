"""Step times of methods, what one gains over another, and where they break even.

This part knows seconds only. Where the seconds come from (`ring_time`, a measurement,
a guess) is the caller's business.
"""

import math
from dataclasses import dataclass

from curvadion_jax.cost_model._checks import check_not_negative, check_rate, check_type


@dataclass(frozen=True)
class Method:
    """What a training method spends in a step.

    Synchronous training is a method that syncs on every step and needs no flag.

    Args:
      compute_time: Forward and backward pass and optimizer, in seconds a step.
      sync_time: Time of one sync, in seconds.
      sync_rate: Share of the steps that sync, in [0, 1].
      flag_time: As `curvadion_jax.cost_model.flag_time`; 0 where there is none.

    Raises:
      ValueError: If a time is negative or the rate lies outside [0, 1].
      TypeError: If one of them is not a number.

    Examples:
      >>> from curvadion_jax.cost_model import Method
      >>> triggered = Method(0.3, sync_time=0.9, sync_rate=0.05, flag_time=0.055)
      >>> round(triggered.step_time, 6)  # 0.3 + 0.05 * 0.9 + 0.055
      0.4
      >>> round(triggered.communication_share, 6)  # 0.1 of 0.4 s
      0.25
    """

    compute_time: float
    sync_time: float
    sync_rate: float = 1.0
    flag_time: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_time", "sync_time", "flag_time"):
            check_not_negative(f"Method.{name}", getattr(self, name), "seconds")
        check_rate("Method.sync_rate", self.sync_rate)

    @property
    def communication_time(self) -> float:
        """Time on the link, in seconds a step, on average."""
        return self.sync_rate * self.sync_time + self.flag_time

    @property
    def step_time(self) -> float:
        """Seconds a step if nothing overlaps, computation plus communication."""
        return self.compute_time + self.communication_time

    @property
    def communication_share(self) -> float:
        """Share of the step time that waits for the link, if nothing overlaps."""
        return self.communication_time / self.step_time if self.step_time else 0.0

    @property
    def overlapped_step_time(self) -> float:
        """Seconds a step if all communication overlaps; no schedule is faster."""
        return max(self.compute_time, self.communication_time)


def _check_methods(method: Method, baseline: Method) -> None:
    for name, value in (("method", method), ("baseline", baseline)):
        check_type(name, value, Method, "Method(compute_time=0.3, sync_time=0.9)")


def speedup(method: Method, baseline: Method, overlap: bool = False) -> float:
    """How many times faster a step of `method` is than one of `baseline`.

    Args:
      method: The method of interest.
      baseline: What it is compared with.
      overlap: False adds computation and communication of both; True takes the larger
        of the two for both (the bound `Method.overlapped_step_time`).

    Returns:
      Step time of the baseline over that of the method; above 1 is faster.

    Raises:
      ValueError: If a step of the method takes no time.
      TypeError: If an argument is not a `Method`.

    Examples:
      >>> from curvadion_jax.cost_model import Method, speedup
      >>> synchronous, rare = Method(0.3, 0.9), Method(0.3, 0.9, sync_rate=0.1)
      >>> round(speedup(rare, synchronous, overlap=True), 6)  # 0.9 / max(0.3, 0.09)
      3.0
    """
    _check_methods(method, baseline)
    ours, theirs = (
        each.overlapped_step_time if overlap else each.step_time
        for each in (method, baseline)
    )
    if ours == 0:
        raise ValueError(
            f"a step of {method!r} takes 0 s; give a compute_time above 0."
        )
    return theirs / ours


def break_even(method: Method, baseline: Method) -> float:
    r"""Largest sync rate at which `method` is no slower than `baseline`, no overlap.

    .. math:: s^* = (t_\text{baseline} - t_\text{compute} - t_\text{flag}) /
              t_\text{sync}

    Args:
      method: The method whose sync rate is sought; its own `sync_rate` is not read.
      baseline: For instance synchronous gradients or synchronous factors.

    Returns:
      The rate that makes both step times equal. Below 0 the method is slower without a
      single sync; from 1 on it is no slower with a sync on every step. Infinite, of
      either sign, where syncs take no time.

    Raises:
      TypeError: If an argument is not a `Method`.

    Examples:
      >>> from curvadion_jax.cost_model import Method, break_even
      >>> triggered = Method(compute_time=0.3, sync_time=2.0, flag_time=0.1)
      >>> round(break_even(triggered, Method(0.3, sync_time=0.3)), 6)
      0.1
      >>> break_even(triggered, Method(0.3, sync_time=0.05)) < 0
      True
    """
    _check_methods(method, baseline)
    spare = baseline.step_time - method.compute_time - method.flag_time
    if method.sync_time == 0:
        return math.copysign(math.inf, spare) if spare else math.inf
    return spare / method.sync_time
