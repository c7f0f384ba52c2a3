"""What may make the gap smaller at equal bytes, tried on a small model first.

    python benchmarks/study/ideas.py            # a minute of a core each; resumes
    python benchmarks/study/ideas.py --table

Each idea changes one thing of `local_muon`, of 2-bit gradients or of AdamW with local
steps, at a share of the bytes. The model has 0.13 million parameters, 8 replicas of
1,024 tokens, and trains 300 steps with the learning rates and the rising momentum of
`gap.md`. Seed 0 first; ideas of `THREE_SEEDS` on two more. A line for each run goes to
`results/ideas.jsonl`.
"""

import dataclasses
import datetime
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import data
import jax
import optax
import rows
import spacing
import study
from curve import BITS
from simulate import Run, Size, simulate

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

FILE = study.RESULTS / "ideas.jsonl"
SIZE = Size(layers=2, width=64, length=64, sequences=16)
STEPS, RATE, ADAMW_RATE = 300, 0.08, 0.02
BUDGETS = (0.07, 0.01, 0.003, 0.14, 0.03)


def in_eight_bits(bits: int) -> compressors.Compressor:
    """Matrices in few bits, and what AdamW trains in 8."""
    few, eight = compressors.quantize(bits), compressors.quantize(8)

    def split(tree: Any) -> tuple[dict, dict]:
        kernels, others = {}, {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            is_matrix = "kernel" in name and "head" not in name
            (kernels if is_matrix else others)[name] = leaf
        return kernels, others

    def average(tree: Any, group: synchronizers.Group) -> compressors.Averaged:
        parts = zip((few, eight), split(tree), strict=True)
        (mean, unsent), (more, more_unsent) = (x.average(y, group) for x, y in parts)
        join = lambda found: jax.tree.map_with_path(
            lambda path, _: found[jax.tree_util.keystr(path)], tree
        )
        return compressors.Averaged(join(mean | more), join(unsent | more_unsent))

    def payload(tree: Any) -> compressors.Payload:
        parts = zip((few, eight), split(tree), strict=True)
        return compressors.Payload(
            averaged=sum(x.payload(y).averaged for x, y in parts)
        )

    return compressors.Compressor(average, payload)


def local_muon(
    budget: float,
    outer: tuple[float, float] | None = (1.0, 0.4),
    form: compressors.Compressor | None = None,
) -> rows.Method:
    """`local_muon` with another outer step, (rate, momentum), or another form."""
    return lambda rate, steps, mesh: cd.local_muon(
        rate,
        budget=budget,
        momentum=rows.rising(steps),
        synchronizer=reconcile(budget, outer, form),
        **rows.matrices(mesh),
    )


def spaced(budget: float, fragments: int, by_rate: bool) -> rows.Method:
    return functools.partial(
        spacing.local_muon, budget=budget, fragments=fragments, by_rate=by_rate
    )


def local_adamw(
    budget: float, outer: tuple[float, float] | None = None, bits: int = 2
) -> rows.Method:
    return lambda rate, steps, mesh: cd.adaptive_sync(
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0),
        triggers.evenly(budget),
        reconcile(budget, outer, compressors.quantize(bits)),
        mesh,
    )


def reconcile(
    budget: float,
    outer: tuple[float, float] | None,
    form: compressors.Compressor | None,
) -> synchronizers.AfterStep:
    step = None if outer is None else optax.sgd(*outer, nesterov=True)
    form = compressors.quantize(BITS[budget]) if form is None else form
    return synchronizers.reconcile(step, compressor=form)


def rounded(form: compressors.Compressor, tree: Any) -> Any:
    """The arrays as their receivers decode them."""
    codec = form.codec
    assert codec is not None
    return codec.decode(codec.encode(tree), tree)


def up_and_down(
    up: compressors.Compressor, down: compressors.Compressor
) -> compressors.Compressor:
    """Contributions in one form, and their mean in another."""

    def average(tree: Any, group: synchronizers.Group) -> compressors.Averaged:
        sent = rounded(up, tree)
        mean = group.mean(sent)
        received = rounded(down, mean)
        unsent = jax.tree.map(
            lambda x, y, m, r: x - y + m - r, tree, sent, mean, received
        )
        return compressors.Averaged(received, unsent)

    def payload(tree: Any) -> compressors.Payload:
        of_both = up.payload(tree).averaged + down.payload(tree).averaged
        return compressors.Payload(of_both // 2)

    return compressors.Compressor(average, payload)


def for_free(form: compressors.Compressor) -> compressors.Compressor:
    """A form at the price of 2 bits: a bound for what better codes may gain."""
    return compressors.Compressor(form.average, compressors.quantize(2).payload)


def with_adam_rate(share: float, budget: float | None) -> rows.Method:
    """Another learning rate for what AdamW trains, of `local_muon` or of Muon."""

    def make(rate, steps, mesh):
        more = dict(
            momentum=rows.rising(steps),
            adam_learning_rate=lambda step: share * rate(step),
            **rows.matrices(mesh),
        )
        if budget is None:
            return cd.presets.synchronous_muon(rate, **more)
        return cd.local_muon(rate, budget=budget, **more)

    return make


def gradients_in_two_bits(momentum: Callable[[int], Any]) -> rows.Method:
    return lambda rate, steps, mesh: cd.presets.synchronous_muon(
        rate,
        momentum=momentum(steps),
        compressor=compressors.quantize(2),
        **rows.matrices(mesh),
    )


SAME = "as `local_muon` has it"
# (method, share of the bytes): the ideas, the first of which is what they change.
IDEAS: dict[tuple[str, float], dict[str, rows.Method]] = {
    ("`local_muon`", budget): {
        SAME: local_muon(budget),
        **{
            f"outer step {rate}, {momentum}": local_muon(budget, (rate, momentum))
            for rate, momentum in ((1.0, 0.2), (1.0, 0.6))
        },
        "what AdamW trains in 8 bits": local_muon(
            budget, form=in_eight_bits(BITS[budget])
        ),
    }
    for budget in BUDGETS
}
# MuLoCo's outer steps, for one worker and for eight.
IDEAS["`local_muon`", 0.01] |= {
    f"outer step {rate}, {momentum}": local_muon(0.01, (rate, momentum))
    for rate, momentum in ((0.7, 0.6), (0.9, 0.8))
}
IDEAS["`local_muon`", 0.003] |= {
    "4 bits": local_muon(0.003, form=compressors.quantize(4)),
    "4 bits, outer step 1.0, 0.2": local_muon(
        0.003, (1.0, 0.2), compressors.quantize(4)
    ),
}
for _budget in (0.01, 0.003):
    IDEAS["`local_muon`", _budget] |= {
        "syncs by the root of the rate": spaced(_budget, 1, True),
        "4 fragments in turn": spaced(_budget, 4, False),
        "both": spaced(_budget, 4, True),
    }
_TWO, _FOUR = compressors.quantize(2), compressors.quantize(4)
IDEAS["`local_muon`", 0.01] |= {
    idea: local_muon(0.01, form=form)
    for idea, form in {
        "4 bits up, 2 down": up_and_down(_FOUR, _TWO),
        "2 bits up, 4 down": up_and_down(_TWO, _FOUR),
        "exact, for as many bytes": for_free(compressors.exact()),
    }.items()
}
for _budget in (0.01, 0.03):
    IDEAS["`local_muon`", _budget] |= {
        f"AdamW's rate times {share}": with_adam_rate(share, _budget)
        for share in (0.25, 0.5, 2)
    }
IDEAS["Muon", 1.0] = {
    f"AdamW's rate times {share}": with_adam_rate(share, None)
    for share in (0.25, 0.5, 2)
}
IDEAS["gradients in 2 bits", 0.07] = {
    "a momentum from 0.8 to 0.95": gradients_in_two_bits(rows.rising),
    "a momentum from 0.6 to 0.95": gradients_in_two_bits(
        lambda steps: optax.linear_schedule(0.6, 0.95, steps)
    ),
    "a momentum of 0.95": gradients_in_two_bits(lambda steps: 0.95),
}
ADAMW = "AdamW with local steps"
for _budget in (0.07, 0.01, 0.03, 0.003):
    IDEAS[ADAMW, _budget] = {
        "the plain mean, 2 bits": local_adamw(_budget),
        "4 bits, half as often": local_adamw(_budget, bits=4),
    }
for _budget in (0.07, 0.01):
    IDEAS[ADAMW, _budget] |= {
        "8 bits, a quarter as often": local_adamw(_budget, bits=8),
        **{
            f"outer step {rate}, {momentum}": local_adamw(_budget, (rate, momentum))
            for rate, momentum in ((1.0, 0.2), (1.0, 0.4))
        },
    }
IDEAS[ADAMW, 0.07]["4 bits, half as often, outer step 1.0, 0.2"] = local_adamw(
    0.07, (1.0, 0.2), bits=4
)


def name(method: str, budget: float, idea: str) -> str:
    """Of a run's method."""
    return f"{method}, {budget:.1%}, {idea}"


METHODS = {
    name(method, budget, idea): made
    for (method, budget), ideas in IDEAS.items()
    for idea, made in ideas.items()
}
REFERENCES = {rows.BEST_MUON: RATE, rows.ADAMW: ADAMW_RATE}
THREE_SEEDS: tuple[tuple[str, float, str], ...] = ()


def plan() -> list[Run]:
    """All runs, in their order."""
    runs = [Run(name, rate, 0, STEPS) for name, rate in REFERENCES.items()]
    for (method, budget), ideas in IDEAS.items():
        rate = ADAMW_RATE if method == ADAMW else RATE
        runs += [Run(name(method, budget, idea), rate, 0, STEPS) for idea in ideas]
    more = [run for run in runs if run.method in REFERENCES]
    for method, budget, idea in THREE_SEEDS:
        same = next(iter(IDEAS[method, budget]))
        of_both = (name(method, budget, same), name(method, budget, idea))
        more += [run for run in runs if run.method in of_both]
    more = [*dict.fromkeys(more)] if THREE_SEEDS else []
    return runs + [Run(x.method, x.rate, seed, STEPS) for seed in (1, 2) for x in more]


def train() -> None:
    """Trains what is missing, one run after the other."""
    text = data.load(str(corpus.TEXT))
    rows.METHODS |= METHODS
    done = study.read(FILE)
    for run in plan():
        if run in done:
            continue
        row = simulate(run, text, study.folder_of(run), SIZE) or {}  # none is stopped
        today = datetime.date.today().isoformat()
        study.keep(FILE, {"run": dataclasses.asdict(run), **row, "date": today})


def table() -> None:
    """Prints each idea's loss above its reference, and the change by the idea."""
    results = study.read(FILE)
    print("| method | bytes | changed | above | change |")
    print("|---|---|---|---|---|")
    for (method, budget), ideas in IDEAS.items():
        reference = rows.ADAMW if method == ADAMW else rows.BEST_MUON
        of = lambda method: {
            run.seed: row for run, row in results.items() if run.method == method
        }
        first = None
        for idea in ideas:
            found = of(name(method, budget, idea))
            if not found:
                continue
            first = first or found
            share = found[0]["bytes"] / found[0]["synchronous_bytes"]
            above = _relative(found, of(reference))
            change = "" if found is first else _relative(found, first)
            print(f"| {method} | {share:.1%} | {idea} | {above} | {change} |")


def _relative(found: dict[int, Any], to: dict[int, Any]) -> str:
    """The mean ± standard deviation over seeds of a loss above another's."""
    each = [
        100 * (found[seed]["loss"] / to[seed]["loss"] - 1)
        for seed in sorted(found.keys() & to.keys())
    ]
    spread = f" ± {statistics.stdev(each):.1f}" if len(each) > 1 else ""
    return f"{statistics.mean(each):+.1f}{spread}%"


if __name__ == "__main__":
    study.train_or_table(__doc__, train, table)
