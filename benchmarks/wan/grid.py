"""What is measured: methods, links, and the cases that make a line of results each."""

import dataclasses
import json
from typing import Any

from job import MESSAGES, STEPS, Part
from line import Conditions


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the comparison.

    Attributes:
        label: In tables.
        rates: Peak learning rates that whole runs are made with, of which the best
            counts; over links, where they change nothing, the first is taken.
        steps: Steps over a link: enough for two syncs or more.
        own: Whether it is this library's.
    """

    label: str
    rates: tuple[float, ...]
    steps: int
    own: bool = True


METHODS = {
    "adamw": Method("synchronous AdamW", (0.01, 0.02, 0.04), 11, own=False),
    "dion": Method("synchronous Dion, rank 1/4", (0.04, 0.02, 0.08), 9),
    "diloco": Method("DiLoCo, every 30 steps", (0.01, 0.005, 0.02), 92),
    "curvadion": Method("`local_muon`, 1% of the bytes", (0.04, 0.02, 0.08), 32),
}
# The same AdamW as the compiler makes it of a `jit`: an all-reduce for each array.
BY_COMPILER = "adamw_jit"
_BY_COMPILER_STEPS = 8
_MESSAGES = 5
# Steps at the start that are not counted: compilation, and a connection's first.
WARM_UP = 2

_RATES = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}
_ROUND_TRIPS = {"0 ms": 0.0, "20 ms": 0.02, "100 ms": 0.1}
_LOSSES = {"0.1% lost": 0.001, "1% lost": 0.01}
# At 1500 bytes a packet the forwarder does not reach a gigabit.
_JUMBO = 9000


def _links() -> dict[str, Conditions]:
    links = {
        f"{rate}, {trip}": Conditions(
            _RATES[rate], _ROUND_TRIPS[trip], mtu=_JUMBO if rate == "1 Gbit/s" else 1500
        )
        for rate in _RATES
        for trip in _ROUND_TRIPS
    }
    name = "100 Mbit/s, 20 ms"
    lossy = {
        f"{name}, {text}": dataclasses.replace(links[name], loss=loss)
        for text, loss in _LOSSES.items()
    }
    worst = f"{name}, 1% lost"
    bbr = dataclasses.replace(lossy[worst], congestion="bbr")
    return links | lossy | {f"{worst}, BBR": bbr}


LINKS = _links()
PARTITIONED = "100 Mbit/s, 20 ms"
# Seconds of silence after which JAX ends the others: its default, and fewer than the
# partition lasts.
HEARTBEATS = (100, 10)


@dataclasses.dataclass(frozen=True)
class Case:
    """A line of results.

    Attributes:
        kind: 'alone', 'loss', 'link' or 'partition'.
        name: Of the link or the method.
        value: The learning rate, or the heartbeat; 0 where there is none.
    """

    kind: str
    name: str = ""
    value: float = 0.0

    def key(self) -> str:
        """The case as JSON; equal for equal cases."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def parts(link: str) -> tuple[Part, ...]:
    """What is done over a link."""
    names = dict.fromkeys(METHODS)
    found = [Part(MESSAGES, _MESSAGES)]
    found += [Part(x, METHODS[x].steps, METHODS[x].rates[0]) for x in names]
    if link in ("10 Mbit/s, 20 ms", "100 Mbit/s, 20 ms", "1 Gbit/s, 20 ms"):
        rate = METHODS["adamw"].rates[0]
        found.append(Part(BY_COMPILER, _BY_COMPILER_STEPS, rate))
    return tuple(found)


def alone() -> tuple[Part, ...]:
    """The same steps without a link."""
    rate = METHODS["adamw"].rates[0]
    own = [Part(x, method.steps, method.rates[0]) for x, method in METHODS.items()]
    return (*own, Part(BY_COMPILER, _BY_COMPILER_STEPS, rate))


def evaluated(case: Case) -> tuple[Part, ...]:
    """A whole run; of the compiler's AdamW, whose losses are AdamW's, a step."""
    return (Part(case.name, 1 if case.name == BY_COMPILER else STEPS, case.value),)


def _losses() -> list[Case]:
    found = [
        Case("loss", name, rate)
        for name, method in METHODS.items()
        for rate in method.rates
    ]
    return [*found, Case("loss", BY_COMPILER, METHODS["adamw"].rates[0])]


PLANS = {
    "alone": [Case("alone")],
    "links": [Case("link", name) for name in LINKS],
    "partition": [Case("partition", PARTITIONED, beat) for beat in HEARTBEATS],
    "losses": _losses(),
}
Record = dict[str, Any]
