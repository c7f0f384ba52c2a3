"""Ideas that the library has no part for: what they end at, with exact syncs.

    python benchmarks/communication/sketches.py

Fragments that are chosen by a signal, replicas in pairs, and a second, slower momentum;
size `cpu`, 300 steps. Results go to `sketches/rows.jsonl` beside this file, a line
a run, and the table to `sketches/table.md`. What is there is not trained again.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import study
import tables
from sizes import SIZES

RESULTS = Path(__file__).with_suffix("")
SIZE = "cpu"
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Sketch:
    """One run of local Muon, with a momentum that rises from 0.8 to 0.95.

    Attributes:
        seed: Of the parameters and the order of the data.
        replicas: Number of replicas, which share the tokens of a step.
        steps: Steps; everything comes together after the last.
        every: Steps between syncs of everything, or in which as many bytes are sent; 0
            sends nothing before the last step.
        outer_momentum: Of the outer step, Nesterov's with a rate of 1.
        fragments: 'none', or which of three parts (attention, feed-forward, the rest)
            comes together whenever its bytes are paid for: each 'in turn', that of the
            largest relative 'drift' or of the largest 'divergence'.
        pairs: Steps between averages of parameters over pairs of replicas; 0 is never.
        partners: 'fixed', of which no bytes are counted, as inside a site, or
            'changing', by one binary digit of their numbers after the other.
        slow: Share of a momentum with a decay rate of 0.98 in what is orthonormalised.
        shared: Whether that momentum is averaged at syncs.
        synchronous: Whether gradients are averaged on every step, which is Muon.
    """

    seed: int = 0
    replicas: int = 8
    steps: int = 300
    every: int = 7
    outer_momentum: float = 0.4
    fragments: str = "none"
    pairs: int = 0
    partners: str = "fixed"
    slow: float = 0.0
    shared: bool = False
    synchronous: bool = False

    def key(self) -> str:
        """The run as canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def but(self, **changes: Any) -> "Sketch":
        """The same run with some fields changed."""
        return dataclasses.replace(self, **changes)


class Idea(NamedTuple):
    """A row of the table, what it is compared with, and the number of its seeds."""

    sketch: Sketch
    base: Sketch
    seeds: int = 1


LOCAL = Sketch()
MEAN = LOCAL.but(outer_momentum=0.0)
SIXTEEN = LOCAL.but(replicas=16)
IDEAS = {
    "everything every 7 steps": Idea(LOCAL, LOCAL, 3),
    "synchronous Muon": Idea(LOCAL.but(synchronous=True, every=0), LOCAL, 3),
    "fragments in turn": Idea(LOCAL.but(fragments="in turn"), LOCAL, 3),
    "the fragment of the largest relative drift": Idea(
        LOCAL.but(fragments="drift"), LOCAL, 3
    ),
    "the fragment of the largest divergence": Idea(
        LOCAL.but(fragments="divergence"), LOCAL
    ),
    "pairs every 8 steps, all every 14": Idea(
        LOCAL.but(every=14, pairs=8, partners="changing"), LOCAL
    ),
    "everything every 7 steps, no outer momentum": Idea(MEAN, LOCAL),
    "pairs every 4 steps, no outer momentum": Idea(
        MEAN.but(every=0, pairs=4, partners="changing"), MEAN
    ),
    "pairs of one site on every step": Idea(LOCAL.but(pairs=1), LOCAL),
    "pairs of one site every 3 steps": Idea(LOCAL.but(pairs=3), LOCAL),
    "16 replicas": Idea(SIXTEEN, LOCAL),
    "16 replicas, pairs of one site on every step": Idea(SIXTEEN.but(pairs=1), SIXTEEN),
    "a slow momentum, a quarter": Idea(LOCAL.but(slow=0.25), LOCAL),
    "a slow momentum, half": Idea(LOCAL.but(slow=0.5), LOCAL),
    "a slow momentum, half, averaged at syncs": Idea(
        LOCAL.but(slow=0.5, shared=True), LOCAL
    ),
}
Results = dict[str, dict[str, Any]]


def read(file: Path) -> Results:
    """The rows so far by the key of their run; a line cut off by a kill is left out."""
    rows = [json.loads(line) for line in study.whole_lines(file)]
    return {Sketch(**row["sketch"]).key(): row for row in rows}


def train(sketches: Sequence[Sketch], size: str, file: Path) -> None:
    """Trains what is missing, run by run."""
    import data
    import exchanges

    done, corpus = read(file), data.load(SIZES[size].data)
    file.write_text("".join(study.whole_lines(file)))
    with file.open("a") as stream:
        for each in sketches:
            if each.key() in done:
                continue
            row = exchanges.train(each, SIZES[size], corpus)
            row |= {"date": datetime.date.today().isoformat()}
            row |= {"on": f"{os.cpu_count()} CPU cores"}
            stream.write(json.dumps({"sketch": dataclasses.asdict(each)} | row) + "\n")
            stream.flush()
            print(f"{row['loss']:.4f} {row['percent']:.2f}% {each.key()}", flush=True)


def document(results: Results) -> str:
    """The table, as Markdown."""
    lines = [
        cells for label, idea in IDEAS.items() if (cells := _line(label, idea, results))
    ]
    made = sorted({f"{row['date']}, {row['on']}" for row in results.values()})
    header = ["idea", "bytes", "loss", "against", "change", "loss by seed"]
    return (
        "# Ideas that the library has no part for\n\n"
        "Local Muon with a rising momentum and exact syncs, 8,192 tokens of all "
        "replicas a step (1,024 of each of 8), 300 steps; losses in nats a byte, of "
        "the mean of the replicas. 100% of the bytes is an all-reduce of everything "
        "on every step; what two replicas of a site send each other is not counted. "
        "A change is that of equal seeds.\n\n"
        f"{'; '.join(made)}, with\n\n"
        "    python benchmarks/communication/sketches.py\n\n"
        f"{tables.markdown(header, lines)}\n"
    )


def _line(label: str, idea: Idea, results: Results) -> list[str]:
    found, base = (_losses(sketch, results) for sketch in (idea.sketch, idea.base))
    if not found:
        return []
    row = results[idea.sketch.but(seed=min(found)).key()]
    change = (
        "" if idea.sketch == idea.base else tables.percent(tables.above(found, base))
    )
    against = {idea.sketch: label for label, idea in IDEAS.items()}[idea.base]
    return [
        *(label, f"{row['percent']:.2f}%", f"{statistics.fmean(found.values()):.4f}"),
        *(against if change else "", change),
        tables.losses_by_seed(found),
    ]


def _losses(sketch: Sketch, results: Results) -> dict[int, float]:
    keys = {seed: sketch.but(seed=seed).key() for seed in SEEDS}
    return {seed: results[key]["loss"] for seed, key in keys.items() if key in results}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    file = options.results / "rows.jsonl"
    wanted = [
        idea.sketch.but(seed=seed)
        for seed in SEEDS
        for idea in IDEAS.values()
        if seed < idea.seeds
    ]
    train(wanted, SIZE, file)
    (options.results / "table.md").write_text(document(read(file)))


if __name__ == "__main__":
    main()
