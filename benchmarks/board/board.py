"""The 1% track: train an entry, count its bytes, and compare it with the others.

    python benchmarks/study/corpus.py                          # the text, once
    python benchmarks/board/board.py audit entries/NAME.py     # a minute
    python benchmarks/board/board.py train entries/NAME.py     # an hour of a core
    python benchmarks/board/board.py table                     # the table of README.md

README.md has the rules. An entry is a file with a function `optimizer(steps, mesh)`
that returns an optimizer of rows. `train` writes a line for each of three seeds to
`entries/NAME.jsonl`, resumes, and counts the bytes.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in ("examples/char_lm", "benchmarks", "benchmarks/study")
]

import corpus  # noqa: E402
import data  # noqa: E402
import jax  # noqa: E402
import measuring  # noqa: E402
import model  # noqa: E402
import rows  # noqa: E402
import scipy.stats  # noqa: E402
import simulate  # noqa: E402
import study  # noqa: E402
import table  # noqa: E402
from simulate import Run, Size  # noqa: E402

import curvadion_jax as cd  # noqa: E402
from curvadion_jax.replicas import Message  # noqa: E402

ENTRIES = Path(__file__).with_name("entries")
LARGEST_SHARE = 0.01
SIZE = Size()  # the study's model, batches and replicas
_RATE = 0.0  # An entry has its own learning rates.


def optimizer_of(entry: Path, steps: int, mesh: Any) -> Any:
    """What the file's function returns."""
    specification = importlib.util.spec_from_file_location(entry.stem, entry)
    if specification is None or specification.loader is None:
        raise ValueError(f"{entry} is no Python file. Give one with `optimizer`.")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.optimizer(steps, mesh)


def sent(message: Message, replicas: int) -> float:
    """Bytes that one replica sends for a message of the audit, which has its result.

    Examples:
        >>> sent(Message("all-reduce", "", 80, ""), replicas=8)  # 2 x 7/8
        140.0
        >>> sent(Message("all-gather", "", 80, ""), replicas=8)  # 10 to 7 others
        70.0
    """
    others = replicas - 1
    factors = {
        "all-reduce": 2 * others / replicas,
        "all-gather": others / replicas,
        "all-to-all": others / replicas,
        "ragged-all-to-all": others / replicas,
        "reduce-scatter": float(others),
    }
    return factors.get(message.kind, 1.0) * message.bytes


def costs(entry: Path, text: data.Corpus, size: Size = SIZE) -> dict[str, float]:
    """Bytes that a replica sends on every step and at a sync, from the program.

    Messages outside of the library's condition count on every step, and votes too.
    `synchronous` is what an all-reduce of float32 gradients sends.
    """
    mesh = cd.replicas.make_mesh(size.replicas)
    gpt = simulate.transformer(size, text)
    tx = optimizer_of(entry, study.STEPS, mesh)
    params = cd.replicas.replicate(simulate.parameters(gpt, 0), mesh)
    differentiate = jax.grad(lambda params, x: model.next_token_loss(gpt, params, x))
    step = measuring.train_step(tx, differentiate, mesh)
    batch = cd.replicas.place(simulate.Batches(text, 0, size).of(0), mesh)
    found = cd.replicas.audit(step, mesh, (params, tx.init(params)), batch)
    of_one = sum(x.nbytes for x in jax.tree.leaves(params)) // size.replicas
    gradients = Message("all-reduce", "", of_one, "")
    total = lambda messages: sum(sent(each, size.replicas) for each in messages)
    return {
        "every_step": total(found.every_step + found.vote),
        "sync": total(found.sync),
        "synchronous": sent(gradients, size.replicas),
    }


def share(row: Mapping[str, Any]) -> float:
    """Of the bytes of synchronous training, of a line of an entry's log."""
    bytes_of = row["costs"]
    total = study.STEPS * bytes_of["every_step"] + row["syncs"] * bytes_of["sync"]
    return total / (study.STEPS * bytes_of["synchronous"])


def train(entry: Path) -> None:
    """Trains the seeds that are missing in the entry's log."""
    log, text = entry.with_suffix(".jsonl"), data.load(str(corpus.TEXT))
    bytes_of = costs(entry, text)
    rows.METHODS[entry.stem] = lambda rate, steps, mesh: optimizer_of(
        entry, steps, mesh
    )
    for seed in study.SEEDS:
        if any(row["seed"] == seed for row in study.rows_of(log)):
            continue
        run = Run(entry.stem, _RATE, seed, study.STEPS)
        row = {"seed": seed, "costs": bytes_of} | study.train(run)
        study.append(log, row)
        print(f"seed {seed}: {row['loss']:.4f}, {share(row):.2%} of the bytes")


def losses(log: Path) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in study.rows_of(log)}


def board() -> Iterator[list[str]]:
    """The cells of the table, the best entry first."""
    logs = {file.stem: losses(file) for file in ENTRIES.glob("*.jsonl")}
    complete = {
        name: log
        for name, log in logs.items()
        if {*log} == {*study.SEEDS} and max(map(share, log.values())) <= LARGEST_SHARE
    }
    mean = lambda name: statistics.fmean(x["loss"] for x in complete[name].values())
    ranked = sorted(complete, key=mean)
    best = table.by_seed(study.read(), rows.BEST_MUON, study.STEPS)
    for place, name in enumerate(ranked):
        log, below = complete[name], ranked[place + 1 :]
        yield [
            str(place + 1),
            f"[{name}](entries/{name}.py)",
            f"{max(map(share, log.values())):.2%}",
            table.spread(table.above(log, best), 1, "%"),
            f"{p_value(log, complete[below[0]]):.3f}" if below else "",
            log[0]["date"],
        ]


def p_value(lower: Mapping[int, Any], higher: Mapping[int, Any]) -> float:
    """Of a paired t-test, one-sided, that the first has lower losses.

    Examples:
        >>> of = lambda *losses: {seed: {"loss": x} for seed, x in enumerate(losses)}
        >>> round(p_value(of(1.0, 1.1, 1.2), of(1.1, 1.19, 1.31)), 4)
        0.0017
    """
    pairs = zip(
        *((lower[s]["loss"], higher[s]["loss"]) for s in study.SEEDS), strict=True
    )
    return float(scipy.stats.ttest_rel(*pairs, alternative="less").pvalue)


HEADER = (
    *("", "entry", "bytes", "above the best Muon"),
    *("p against the row below", "date"),
)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("audit", "train", "table"))
    parser.add_argument("entry", type=Path, nargs="?")
    options = parser.parse_args()
    if options.command == "table":
        measuring.table(HEADER, board())
        return
    if options.entry is None:
        parser.error("give the entry's file")
    jax.config.update("jax_num_cpu_devices", SIZE.replicas)
    if options.command == "train":
        train(options.entry)
        return
    found = costs(options.entry, data.load(str(corpus.TEXT)))
    print({name: round(each) for name, each in found.items()})
    paid = LARGEST_SHARE * found["synchronous"] - found["every_step"]
    most = study.STEPS * paid / found["sync"] if found["sync"] else 0.0
    print(f"1% of the bytes pay for {max(0, int(most))} syncs in {study.STEPS} steps.")


if __name__ == "__main__":
    main()
