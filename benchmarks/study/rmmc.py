"""What the relative momentum change (RMMC) measures, in training the study's model.

    python benchmarks/study/rmmc.py      # some 20 minutes of a core; results/rmmc.json
    python benchmarks/study/rmmc.py --picture       # that of docs/, and the numbers

`start`: the CurvaDion authors' rules, replicas that stay equal as in their script: Dion
of rank 1/8 for matrices, Lion for other parameters, a learning rate of 0.02 without
warmup (1/sqrt(width) of it for the head). Norms of the momentum M and of M + G of each
layer, on every step, for three decay rates of Lion's momentum. From these follows what
each rule would see: all parameters or matrices, with a floor of 0.1 or without, and
with Lion's momentum corrected for its zero start.

`whole`: `curvadion(budget=0.01)` with its defaults on 8 replicas. On every step RMMC
and its threshold, the learning rate, the gradient noise scale tr(covariance) / |mean|^2
over the replicas' gradients, in tokens, which between syncs has their drift in it, and
the curvature d'Hd / |d|^2 of one replica's loss on its batch along its update d. From
two thirds of the steps on, the text is that of other packages.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import data
import jax
import jax.numpy as jnp
import measuring
import model
import numpy as np
import optax
import scipy.stats
import themed
from rows import CURVADION, METHODS
from simulate import Batches, Size, gradients_of, parameters, transformer

import curvadion_jax as cd

FILE = Path(__file__).with_name("results") / "rmmc.json"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "rmmc.svg"
RATE, WIDTH_OF_HEAD, THRESHOLD, FLOOR = 0.02, 128, 0.1, 0.1
BETAS = (0.9, 0.95, 0.99)
START, WHOLE = 100, 260


def start(text: data.Corpus, beta: float, steps: int, size: Size) -> Any:
    """Norms of M and of M + G, by layer, [steps, layers]."""
    gpt = transformer(size, text)
    params = parameters(gpt, 0)
    tx = cd.dion(
        RATE,
        rank=0.125,
        momentum=0.95,
        weight_decay=0.01,
        other_optimizer=_lion(beta),
        dimension_numbers=measuring.matrices,
    )
    of_batch = jax.grad(functools.partial(model.next_token_loss, gpt))

    @jax.jit
    def step(params, state, batch):
        gradients = of_batch(params, batch)
        momenta = _momenta(state)
        both = optax.tree.add(momenta, gradients)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, (_norms(momenta), _norms(both))

    state, batches = tx.init(params), Batches(text, 0, size)
    rows = []
    for number in range(steps):
        batch = batches.of(number).reshape(-1, size.length + 1)
        params, state, norms = step(params, state, batch)
        rows.append([np.asarray(x).tolist() for x in norms])
    before, after = zip(*rows, strict=True)
    last = np.asarray(_norms(_momenta(state))).tolist()
    return {
        "before": before,
        "after": after,
        "last": last,
        "matrix": _is_matrix(params),
    }


def _lion(beta: float) -> optax.GradientTransformation:
    def scaled(updates, params=None):
        return jax.tree.map_with_path(
            lambda path, x: (
                x / math.sqrt(WIDTH_OF_HEAD) if "lm_head" in str(path) else x
            ),
            updates,
        )

    return optax.chain(
        optax.scale_by_lion(b1=0.9, b2=beta),
        optax.stateless(scaled),
        optax.scale_by_learning_rate(RATE),
    )


def _momenta(state: Any) -> Any:
    """Dion's momenta, and Lion's in the place of other parameters."""
    of_dion = optax.tree.get(state, "momentum")
    of_lion = optax.tree.get(state, "mu")
    return jax.tree.map(
        lambda m, mu: mu if isinstance(m, optax.MaskedNode) else m,
        *(of_dion, of_lion),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def _norms(tree: Any) -> jax.Array:
    """One of each layer; kernels of the blocks are stacks of them."""
    return jnp.concatenate([_of_layers(x) for x in jax.tree.leaves(tree)])


def _of_layers(x: jax.Array) -> jax.Array:
    layers = x.reshape(len(x), -1) if x.ndim == 3 else x.reshape(1, -1)
    return jnp.linalg.norm(layers, axis=1)


def _is_matrix(params: Any) -> list[bool]:
    leaves = jax.tree.leaves(params)
    return [x.ndim == 3 for x in leaves for _ in range(len(x) if x.ndim == 3 else 1)]


def whole(text: data.Corpus, steps: int, size: Size) -> Any:
    """What there is to see on each step of a run of `curvadion`."""
    gpt = transformer(size, text)
    mesh = cd.replicas.simulated(size.replicas)
    params = cd.replicas.replicate(parameters(gpt, 0), mesh)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.04, steps // 10, steps, 0.002)
    tx = METHODS[CURVADION](schedule, steps, mesh)
    loss = functools.partial(model.next_token_loss, gpt)

    @jax.jit
    def step(params, state, batch):
        gradients = gradients_of(gpt, params, batch)
        updates, state = tx.update(gradients, state, params)
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), gradients)
        inside = optax.tree.norm(optax.tree.sub(gradients, mean), squared=True)
        variance = inside / (size.replicas - 1)
        signal = optax.tree.norm(mean, squared=True) - variance / size.replicas
        noise = size.sequences * size.length * variance / signal
        first, along = jax.tree.map(lambda x: x[0], (params, updates))
        _, turned = jax.jvp(lambda p: jax.grad(loss)(p, batch[0]), (first,), (along,))
        curvature = optax.tree.vdot(along, turned) / optax.tree.norm(
            along, squared=True
        )
        counters = state.counters
        value, synced = jnp.max(counters.value), counters.since == 0
        seen = (value, counters.threshold, synced, noise, curvature)
        return optax.apply_updates(params, updates), state, seen

    training = params, tx.init(params)
    first, second = _halves(text)
    names = ("rmmc", "threshold", "synced", "noise", "curvature")
    rows: dict[str, list[float]] = {name: [] for name in (*names, "rate")}
    batches = [Batches(part, 0, size) for part in (first, second)]
    for number in range(steps):
        batch = batches[number >= 2 * steps // 3].of(number)
        *training, seen = step(*training, batch)
        rows["rate"].append(float(schedule(number)))
        for name, value in zip(names, seen, strict=True):
            rows[name].append(float(value))
    return rows


def _halves(text: data.Corpus) -> list[data.Corpus]:
    """The packages of the first half of the alphabet, and the others."""
    (whole_text,) = text.training
    parts = np.array_split(whole_text, 2)
    return [dataclasses.replace(text, training=[part]) for part in parts]


def read_by(log: Any, beta: float, rule: str) -> np.ndarray:
    """What a rule sees on each step but the first: the largest change over layers.

    Args:
        log: That of `start`.
        beta: Decay rate of Lion's momentum there.
        rule: 'published'; the same with 'no floor'; of 'matrices' alone; or
            'corrected', Lion's momentum over 1 - beta^t compared with the last one.
    """
    before, after = (np.array(log[name])[1:] for name in ("before", "after"))
    matrix, counted = np.array(log["matrix"]), before > FLOOR
    if rule == "no floor":
        counted = before > 0
    if rule == "matrices":
        counted = counted & matrix
    change = np.abs(after - before) / np.where(counted, before, 1)
    if rule == "corrected":
        ages = 1 - beta ** np.arange(1, 2 + len(before))[:, None]
        momenta = np.vstack([before, log["last"]]) / ages
        ratio = momenta[1:] / np.where(counted, momenta[:-1], 1)
        change = np.where(matrix, change, np.abs(ratio - 1))
    return np.max(np.where(counted, change, 0), axis=1)


def of_the_head(log: Any, beta: float) -> list[str]:
    """Steps on which the published rule reads the head, and RMMC on those up to 10."""
    before, after = (np.array(log[name])[1:] for name in ("before", "after"))
    counted = before > FLOOR
    change = np.where(counted, np.abs(after - before) / np.where(counted, before, 1), 0)
    is_head = change.argmax(axis=1) == change.shape[1] - 1  # the last layer
    first = int(is_head.argmax())
    last = first + int((~is_head[first:]).argmax())
    values = change.max(axis=1)[first : min(last, 10)]
    over = values * (1 - beta ** (1 + np.arange(first, first + len(values))))
    return [f"{first + 1} to {last}", f"{over.min():.2f} to {over.max():.2f}"]


RULES = ("published", "no floor", "matrices", "corrected")


def report(found: dict[str, Any]) -> str:
    """The numbers, as three Markdown tables."""
    rows = []
    for name, log in found["start"].items():
        beta = float(name)
        expected = " ".join(f"{1 / (1 - beta**t):.2f}" for t in (1, 2, 3))
        for rule in RULES:
            values = read_by(log, beta, rule)
            first = " ".join(f"{value:.2f}" for value in values[:3])
            fires = values > THRESHOLD
            later = f"{fires[20:].sum()} of {len(fires) - 20}"
            rows.append([name, rule, first, expected, str(fires[:20].sum()), later])
    header = ["Lion's beta", "rule", "steps 1, 2, 3", "1/(1 - beta^t)"]
    header += [f"steps above {THRESHOLD}: of the first 20", "of the others"]
    lines = [*measuring.markdown(header, rows), ""]
    rows = [[x, *of_the_head(log, float(x))] for x, log in found["start"].items()]
    header = ["Lion's beta", "the head is largest on steps"]
    header += ["RMMC over 1/(1 - beta^t) on those up to 10"]
    lines += [*measuring.markdown(header, rows), ""]
    run, rows = seen_after_the_first_step(found), []
    for name in ("curvature", "noise", "rate", "rate x curvature"):
        parts = slice(None), slice(len(run["rmmc"]) // 10, None)
        found_in = (scipy.stats.spearmanr(run["rmmc"][x], run[name][x]) for x in parts)
        rows.append([name, *(f"{each.statistic:.2f}" for each in found_in)])
    header = ["RMMC's rank correlation with", "all steps", "after warmup"]
    lines += [*measuring.markdown(header, rows), ""]
    usual = np.mean((run["rmmc"] > 0.1) & (run["rmmc"] < 1))
    return "\n".join(
        [*lines, f"RMMC is between 0.1 and 1 on {usual:.0%} of the steps."]
    )


def seen_after_the_first_step(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of the whole run; the noise is infinite where the mean gradient is lost in it."""
    run = {name: np.array(values)[1:] for name, values in found["whole"].items()}
    run["noise"] = np.where(run["noise"] > 0, run["noise"], np.inf)
    run["rate x curvature"] = run["rate"] * run["curvature"]
    return run


def draw(found: dict[str, Any]) -> None:
    """The authors' rule at the start of runs, then one whole run by quantity."""
    figure, every = themed.subplots(980, 5)
    begin, change, rate, noise, along = every[:, 0]
    for axes in every[:, 0]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1 else f"{x:,.0f}")
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.grid()
    colors = (themed.BLUE, themed.ORANGE, themed.GREEN)
    for color, (name, log) in zip(colors, found["start"].items(), strict=True):
        beta, steps = float(name), np.arange(1, len(log["before"]))
        values = read_by(log, beta, "published")
        begin.plot(steps, values, color=color, label=f"beta {name}")
        begin.plot(steps, 1 / (1 - beta**steps), color=color, linestyle=":")
    values = read_by(found["start"]["0.95"], 0.95, "matrices")
    begin.plot(steps, values, color=themed.INK, linewidth=1, label="matrices, 0.95")
    begin.axhline(THRESHOLD, color=themed.LINE, linewidth=0.8)
    begin.legend(loc="upper right", frameon=False, ncols=2, handlelength=1)
    begin.set_ylim(top=300)
    begin.set_title("RMMC by the authors' rule; dotted 1/(1 - beta^t)")

    run = seen_after_the_first_step(found)
    steps = np.arange(1, 1 + len(run["rmmc"]))
    change.plot(steps, run["rmmc"], color=themed.BLUE, linewidth=0.8, label="RMMC")
    change.plot(steps, run["threshold"], color=themed.ORANGE, label="threshold")
    change.legend(loc="upper right", frameon=False, ncols=2, handlelength=1)
    change.set_title("curvadion(budget=0.01): RMMC")
    rate.plot(steps, run["rate"], color=themed.BLUE)
    rate.set_yticks([0.003, 0.01, 0.03])
    rate.set_title("the same run: learning rate")
    noise.plot(steps, run["noise"], color=themed.BLUE, linewidth=0.8)
    noise.set_title("the same run: gradient noise, in tokens")
    along.plot(steps, np.abs(run["curvature"]), color=themed.BLUE, linewidth=0.8)
    along.set_title("the same run: |curvature along the update|")
    for axes in (change, rate, noise, along):
        axes.axvline(2 * len(found["whole"]["rmmc"]) // 3, color=themed.LINE)
    along.set_xlabel("step; other text from the vertical line on")
    themed.save(figure, PICTURE)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", action="store_true", help="of what was found")
    if not parser.parse_args().picture:
        text = data.load(str(corpus.TEXT))
        found = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
        found["start"] = {str(beta): start(text, beta, START, Size()) for beta in BETAS}
        found["whole"] = whole(text, WHOLE, Size())
        rounded = lambda x: float(f"{x:.5g}") if isinstance(x, float) else x
        FILE.write_text(json.dumps(jax.tree.map(rounded, found)))
    found = json.loads(FILE.read_text())
    draw(found)
    print(report(found))


if __name__ == "__main__":
    main()
