"""Which runs the study makes: methods, how each is tuned, and what is then compared.

A plan is a function from the results so far to runs, since the later plans take the
tuned values from the earlier ones: `rates`, `momenta`, `outers`, `grid` and `others`,
then the rest.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from compared import BUDGET, METHODS
from runs import Run

Results = Mapping[str, Mapping[str, Any]]

BUDGETS = (0.1, BUDGET, 0.001)
REPLICAS = (2, 4, 8)
DROPPED = (0.0, 0.1, 0.3, 0.5)

# The winner and its rivals, which are run at all budgets; rivals at one of them; and
# the references.
AT_BUDGETS = ("local_muon", "muloco", "diloco", "sparseloco")
_CORE = (*AT_BUDGETS, "muloco_2_bits", "quantised", "dion", "muon", "adamw")


def _tunings(name: str) -> list[Run]:
    """All combinations from which the steps of the tuning choose."""
    method = METHODS[name]
    momenta = (method.run.momentum, *method.momenta)
    one_by_one = [
        method.run.but(learning_rate=rate, momentum=momentum, outer=outer)
        for rate in method.rates
        for momentum in momenta
        for outer in (method.run.outer, *method.outers)
    ]
    return list(dict.fromkeys([*one_by_one, *_together(name)]))


def _together(name: str) -> list[Run]:
    """Those of a method's grid."""
    method = METHODS[name]
    return [
        method.run.but(learning_rate=rate, outer=outer)
        for rate, outers in method.grid.items()
        for outer in outers
    ]


def tuning_of(name: str, results: Results) -> list[Run]:
    """The runs of a method's tuning that have a result."""
    return [run for run in _tunings(name) if run.key() in results]


def tuned(name: str, results: Results, outer: str | None = None) -> Run | None:
    """The best run of a method's tuning so far, None before the first.

    Args:
        name: Of the method.
        results: All so far.
        outer: Of runs with this outer step alone; None is any.
    """

    def loss(run: Run) -> float:
        value = results[run.key()]["loss"]
        return value if math.isfinite(value) else math.inf

    found = tuning_of(name, results)
    return min((x for x in found if outer in (None, x.outer)), key=loss, default=None)


def _best(name: str, results: Results, outer: str | None = None) -> Run:
    run = tuned(name, results, outer)
    if run is None:
        raise ValueError(f"{name} is not tuned yet: train the plan 'rates' first")
    return run


def at_all_budgets(name: str, results: Results) -> list[Run]:
    """The tuned run of a method, and the same at the other budgets."""
    run = tuned(name, results)
    if run is None:
        return []
    word = run.trigger.split()[0]
    if word != "evenly":
        return [run]
    return [run.but(trigger=f"{word} {budget}") for budget in BUDGETS]


def _rates(names) -> list[Run]:
    return [
        METHODS[name].run.but(learning_rate=rate)
        for name in names
        for rate in METHODS[name].rates
    ]


def rates(results: Results) -> list[Run]:
    """The references, the winner and its rivals with each learning rate."""
    del results
    return _rates(_CORE)


def leaders(results: Results) -> list[Run]:
    """The references, the winner and its closest rival, for the other sizes.

    Each with every learning rate, and with the momentum and the outer step that won
    at size `cpu`.
    """
    del results
    won = {
        "dion": {},
        "muon": {"momentum": 0.8},
        "local_muon": {"momentum": 0.8, "outer": "nesterov 1.0 0.4"},
        "muloco": {"momentum": 0.8, "outer": "nesterov 1.0 0.6"},
    }
    return [run.but(**values) for name, values in won.items() for run in _rates([name])]


def momenta(results: Results) -> list[Run]:
    """The same with other decay rates, at the best learning rate.

    With the outer step from which the tuning starts: run again, it trains nothing more.
    """
    return [
        _best(name, results).but(momentum=momentum, outer=METHODS[name].run.outer)
        for name in _CORE
        for momentum in METHODS[name].momenta
    ]


def outers(results: Results) -> list[Run]:
    """The same with other outer steps, at the best of both."""
    return [
        _best(name, results, METHODS[name].run.outer).but(outer=outer)
        for name in _CORE
        for outer in METHODS[name].outers
    ]


def grid(results: Results) -> list[Run]:
    """Rates and outer steps together, of methods that one after the other misled."""
    del results
    return [run for name in METHODS for run in _together(name)]


def seeds(results: Results) -> list[Run]:
    """The references and the winner with more seeds, its closest rival among them."""
    close = ("dion", "muon", "local_muon", "muloco", "muloco_2_bits", "as_it_comes")
    far = ("diloco", "sparseloco")
    wanted = [(name, seed) for name in close for seed in (1, 2, 3, 4)]
    wanted += [(name, seed) for name in far for seed in (1, 2)]
    return [_best(name, results).but(seed=seed) for name, seed in wanted]


def timing(results: Results) -> list[Run]:
    """The winner with syncs where the relative momentum change is large."""
    run = _best("local_muon", results).but(trigger=f"budget {BUDGET}")
    return [run.but(seed=seed) for seed in (0, 1, 2)]


def ideas(results: Results) -> list[Run]:
    """Variations of the winner, one at a time."""
    del results
    base = METHODS["local_muon"].run
    return [
        # Frequent while the learning rate is high: 1.4% of the bytes.
        base.but(trigger="quadratic 0.131"),
        # Fewer scales, more syncs.
        base.but(compressor="int 2 2 1024"),
        # What the local steps lose when nothing keeps the replicas apart.
        *(
            base.but(trigger="always", compressor="exact", outer=outer, momentum=0.8)
            for outer in ("mean", base.outer)
        ),
        # What compression costs at the same times.
        base.but(compressor="exact", trigger="every 7"),
    ]


def others(results: Results) -> list[Run]:
    """Every other method with each learning rate."""
    del results
    return _rates(name for name in METHODS if name not in _CORE)


def budgets(results: Results) -> list[Run]:
    """The winner and its rivals at all budgets."""
    return [run for name in AT_BUDGETS for run in at_all_budgets(name, results)]


def with_replicas(name: str, results: Results) -> list[Run]:
    """The tuned run of a method, with fewer replicas too, on the same batches."""
    return [_best(name, results).but(replicas=number) for number in REPLICAS]


def replicas(results: Results) -> list[Run]:
    """The winner and its rivals with any number of replicas, the closest on 3 seeds."""
    runs = [run for name in AT_BUDGETS for run in with_replicas(name, results)]
    close = [*with_replicas("local_muon", results), *with_replicas("muloco", results)]
    return runs + [run.but(seed=seed) for run in close for seed in (1, 2)]


def with_dropped(results: Results) -> list[Run]:
    """The winner with shares of all participations in syncs left out."""
    return [_best("local_muon", results).but(dropped=share) for share in DROPPED]


def participation(results: Results) -> list[Run]:
    """The same with more seeds."""
    runs = with_dropped(results)
    return [run.but(seed=seed) for run in runs for seed in (0, 1, 2)]


_ALL = (
    *(rates, leaders, momenta, outers, grid),
    *(ideas, seeds, timing, budgets, others, replicas, participation),
)
PLANS: dict[str, Callable[[Results], list[Run]]] = {
    plan.__name__: plan for plan in _ALL
}
