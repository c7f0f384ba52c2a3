"""What the scripts that measure share: a clock, programs in turn, quartiles, tables.

Programs take turns in random order, so that what else happens on the machine meets all
of them, and start every round from new arrays: where these lie moves a time by some
percent. On a CPU time is that of the processor, of all threads together, which other
work disturbs least. Give the program one core, as by `taskset -c 0`, so that no threads
wait for each other.
"""

import argparse
import itertools
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

import curvadion_jax as cd
from curvadion_jax.step import _one_branch

when = _one_branch.when  # programs of a local step, and of a sync

Turn = Callable[[], Callable[[], Any]]
"""Makes new arrays, and returns a function that takes one step and waits for it."""


def clock() -> Callable[[], float]:
    """The processor's time on a CPU, else a clock's."""
    on_cpu = jax.default_backend() == "cpu"
    return time.process_time if on_cpu else time.perf_counter


def take_turns(
    turns: Mapping[str, Turn],
    rounds: int,
    calls: int,
    warmup: int = 0,
    apart: bool = False,
) -> list[dict[str, float]]:
    """Median seconds of a call of each, by round.

    Calls of all are interleaved, or `apart` follow one another, so that the arrays of
    one program alone are there at a time.
    """
    now, found = clock(), []
    for number in range(rounds):
        order = random.Random(number)
        names = order.sample([*turns], len(turns))
        taken: dict[str, list[float]] = {name: [] for name in turns}
        for group in [[name] for name in names] if apart else [names]:
            steps = {name: turns[name]() for name in group}
            for call in range(warmup + calls):
                for name in order.sample(group, len(group)):
                    start = now()
                    steps[name]()
                    if call >= warmup:
                        taken[name].append(now() - start)
            del steps
        found.append({name: statistics.median(x) for name, x in taken.items()})
    return found


def ratio(rounds: Sequence[Mapping[str, float]], name: str, against: str) -> str:
    """Median and quartiles of how many times as long one takes as another."""
    ratios = [each[name] / each[against] for each in rounds]
    if len(ratios) < 2:
        return f"{ratios[0]:.3g}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def seconds(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    """The median over the rounds."""
    return statistics.median(each[name] for each in rounds)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"{'|---' * len(header)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def grouped(rows: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """Rows without their first cell: in bold, it heads those that share it.

    So a table fits a phone.

    Examples:
        >>> [*grouped([("a", "1", "2"), ("a", "3", "4")])]
        [['**a**', ''], ['1', '2'], ['3', '4']]
    """
    for name, members in itertools.groupby(rows, key=operator.itemgetter(0)):
        lines = [list(row[1:]) for row in members]
        yield [f"**{name}**", *[""] * (len(lines[0]) - 1)]
        yield from lines


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table, each row as soon as it is there."""
    for line in markdown(header, rows):
        print(line, flush=True)


def where(options: argparse.Namespace) -> str:
    """What a table depends on."""
    device = jax.devices()[0].device_kind
    return (
        f"\n{device}, JAX {jax.__version__}, Optax {optax.__version__}, {vars(options)}"
    )


def parser(description: str) -> argparse.ArgumentParser:
    """With the whole docstring as help."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def train_step(tx: Any, differentiate: Callable, mesh: Any) -> Callable:
    """A jitted step from (parameters, optimizer state), rows, and a batch.

    `differentiate` takes one replica's parameters and batch to gradients.
    """

    def step(state, batch):
        params, opt_state = state
        gradients = cd.replicas.map(differentiate, mesh)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step, donate_argnums=0)


def matrices(params: Any) -> Any:
    """The dimension numbers of the benchmarks' models, whose losses say the same.

    Every kernel but the head's is [..., fan_in, fan_out], behind an axis of layers.
    """

    def numbers(path, _):
        names = jax.tree_util.keystr(path)
        is_matrix = "kernel" in names and "head" not in names
        return cd.DimensionNumbers(-2, -1) if is_matrix else None

    return jax.tree.map_with_path(numbers, params)


def muon(rate: Any, **options: Any) -> optax.GradientTransformation:
    """Optax's Muon of one replica, on the matrices of the benchmarks' models."""
    return optax.contrib.muon(rate, muon_weight_dimension_numbers=matrices, **options)


def in_mebibytes(compiled: Any) -> tuple[float, float, float]:
    """Of arguments, of results that are not written over them, of temporary arrays."""
    memory = compiled.memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = memory.argument_size_in_bytes, kept, memory.temp_size_in_bytes
    return tuple(size / 2**20 for size in sizes)
