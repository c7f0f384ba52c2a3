"""Step times of methods, what one gains over another, and where they break even.

This part knows seconds only. Where the seconds come from (`ring_time`, a measurement,
a guess) is the caller's business.
"""

import math
from dataclasses import dataclass

from curvadion_jax.cost_model._checks import (
    check_not_negative,
    check_rate,
    check_type,
)


@dataclass(frozen=True)
class Method:
    """What a training method spends in a step.

    Synchronous training is a method that syncs on every step and needs no flag. For one
    that is reduced only on every k-th step, or hidden behind the computation, see
    `curvadion_jax.cost_model.flag_time`.

    Args:
      compute_time: Forward and backward pass and optimizer, in seconds a step.
      sync_time: Time of one sync, in seconds.
      sync_rate: Share of the steps that sync, in [0, 1].
      flag_time: Time of the flag, in seconds a step; 0 where there is none.

    Raises:
      ValueError: If a time is negative or the rate lies outside [0, 1].

    Examples:
      >>> from curvadion_jax.cost_model import Method, speedup
      >>> synchronous = Method(compute_time=0.3, sync_time=0.9)
      >>> triggered = Method(0.3, sync_time=0.9, sync_rate=0.05, flag_time=0.055)
      >>> round(triggered.step_time, 6)  # 0.3 + 0.05 * 0.9 + 0.055
      0.4
      >>> round(speedup(triggered, synchronous), 6)
      3.0
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
    def overlapped_step_time(self) -> float:
        """Seconds a step if all communication overlaps, the larger of the two.

        A bound: no schedule is faster. It lets a sync spread over the steps around it,
        which a method that uses the result at once cannot do.
        """
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

    Examples:
      >>> from curvadion_jax.cost_model import Method, speedup
      >>> synchronous, rare = Method(0.3, 0.9), Method(0.3, 0.9, sync_rate=0.1)
      >>> round(speedup(rare, synchronous, overlap=True), 6)  # 0.9 / max(0.3, 0.09)
      3.0
    """
    _check_methods(method, baseline)
    if overlap:
        ours, theirs = method.overlapped_step_time, baseline.overlapped_step_time
    else:
        ours, theirs = method.step_time, baseline.step_time
    if ours == 0:
        raise ValueError(
            f"a step of {method!r} takes 0 s; give a compute_time above 0."
        )
    return theirs / ours


@dataclass(frozen=True)
class BreakEven:
    """The largest sync rate at which a method is no slower than its baseline.

    Printed as "never" if the method is slower even without a single sync, as "always"
    if it is no slower with a sync on every step, and as a percentage otherwise.

    Args:
      sync_rate: The rate that makes both step times equal; below 0 means never, 1 and
        above always. Infinite if syncs take no time.

    Examples:
      >>> from curvadion_jax.cost_model import BreakEven
      >>> print(BreakEven(0.25), BreakEven(-0.1), BreakEven(1.5))
      25.00% never always
    """

    sync_rate: float

    @property
    def never(self) -> bool:
        """Whether the method is slower at every sync rate."""
        return self.sync_rate < 0

    @property
    def always(self) -> bool:
        """Whether the method is no slower at any sync rate."""
        return self.sync_rate >= 1

    def __str__(self) -> str:
        if self.never:
            return "never"
        return "always" if self.always else f"{self.sync_rate:.2%}"


def break_even(method: Method, baseline: Method) -> BreakEven:
    r"""Largest sync rate at which `method` is no slower than `baseline`, no overlap.

    .. math:: s^* = (t_\text{baseline} - t_\text{compute} - t_\text{flag}) /
              t_\text{sync}

    Args:
      method: The method whose sync rate is sought; its own `sync_rate` is not read.
      baseline: For instance synchronous gradients or synchronous factors.

    Returns:
      The rate, and whether it means never or always.

    Examples:
      >>> from curvadion_jax.cost_model import Method, break_even
      >>> triggered = Method(compute_time=0.3, sync_time=2.0, flag_time=0.1)
      >>> for sync_time in (0.05, 0.3, 4.0):
      ...     print(break_even(triggered, Method(0.3, sync_time)))
      never
      10.00%
      always
    """
    _check_methods(method, baseline)
    spare = baseline.step_time - method.compute_time - method.flag_time
    if method.sync_time == 0:
        return BreakEven(math.copysign(math.inf, spare) if spare else math.inf)
    return BreakEven(spare / method.sync_time)
