"""The training loop: several methods in a row, on the same data in the same order.

`train_step` is written for one replica and has no collective in it; what is sent, and
when, is the optimizer's business.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import journal
import methods
import model
import numpy as np
import picture
import processes
import report
from config import Config, UserError
from data import Corpus, load
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import curvadion_jax as cd


def run(
    config: Config, names: Sequence[str], out: Path, *, restart: bool = False
) -> list[dict[str, Any]]:
    """Train the named methods, or what is left of them, and report on all in `out`.

    Args:
        config: The comparison.
        names: Methods to train, in this order; see `methods.METHODS`.
        out: Directory of the results; a run in it that was stopped is continued.
        restart: Discard the run in `out` first.

    Returns:
        The summary, one dictionary a method, as in `summary.json`.

    Raises:
        ValueError: `out` holds a run of another configuration, there are fewer
            devices than replicas, or the data cannot be used.
        Interrupted: Ctrl-C or SIGTERM; the same call continues.
        OSError: a file cannot be written; what was saved before stays.
    """
    corpus = processes.together(lambda: load(config.data))
    processes.check_devices(config.replicas)
    settings = dataclasses.asdict(config) | {"data": corpus.fingerprint}
    processes.check_same(settings | {"method": list(names), "restart": restart})
    # How often a run is saved changes nothing in it.
    del settings["checkpoint_every"]
    _open(out, settings, restart)
    mesh = cd.replicas.make_mesh(config.replicas)
    summary = report.read_json(out / "summary.json", [])
    finished = [any(row["method"] == name for row in summary) for name in names]
    finished = processes.from_first(np.array(finished))
    with journal.stop_on_signal() as stop:
        for name, done in zip(names, finished, strict=True):
            if not done:
                summary.append(_train(name, config, corpus, mesh, out, stop))
                if processes.is_first():
                    report.write_json(out / "summary.json", summary)
            elif processes.is_first():
                print(f"{name}: finished before, not trained again")
    if processes.is_first():
        _show(summary, out)
    return summary


def _open(out: Path, settings: dict[str, Any], restart: bool) -> None:
    """Let the first process make the directory, and the others look for it."""

    def make():
        if processes.is_first():
            report.open_directory(out, settings, methods.METHODS, restart)

    def look():
        if not (out / "config.json").exists():
            raise UserError(
                f"--out {out} of process 0 is not there in process "
                f"{jax.process_index()}: give a directory that all processes share"
            )

    processes.together(make)
    processes.together(look)


def _show(summary: list[dict[str, Any]], out: Path) -> None:
    """The picture and the table."""
    lines = {
        row["method"]: journal.read_journal(out / f"{row['method']}.jsonl")
        for row in summary
    }
    with report.naming(out / "picture.png"):
        picture.draw(lines, summary, out / "picture.png")
    print(report.table(summary))
    print(f"{out / 'summary.json'}, {out / 'picture.png'}")


def _train(
    name: str,
    config: Config,
    corpus: Corpus,
    mesh: Mesh,
    out: Path,
    stop: journal.Stop,
) -> dict[str, Any]:
    """Train one method to the end and return its row of the summary."""
    gpt = make_model(config, corpus)
    state = cd.replicas.replicate(initial_state(gpt, name, config), mesh)
    step_fn = cd.replicas.step(make_train_step(gpt), mesh)
    evaluate = make_evaluation(gpt, config, corpus, mesh)
    checkpoints = out / "checkpoints" / name
    start, seconds = cd.checkpoint.latest_step(checkpoints) or 0, 0.0
    start = int(processes.from_first(np.array(start)))
    if start:
        state = cd.checkpoint.restore(checkpoints, state, start)
        seconds = cd.checkpoint.read_extra(checkpoints, start)["seconds"]
    sequences = config.replicas * config.batch
    divided = NamedSharding(mesh, PartitionSpec(cd.replicas.AXIS))
    rows = processes.rows(divided, sequences)
    loss = None
    with processes.together(
        lambda: journal.Progress(name, config.steps, out, start, seconds)
    ) as progress:
        for step in range(start + 1, config.steps + 1):
            seed = (config.seed, step)
            local = corpus.training_batch(seed, sequences, config.sequence_length, rows)
            batch = processes.divided(local, divided, sequences)
            if step == start + 1:
                with progress.compiling():
                    _compile(step_fn, state, batch)
                    state, metrics = jax.block_until_ready(step_fn(state, batch))
            else:
                state, metrics = step_fn(state, batch)
            last = step == config.steps
            evaluated = last or step % config.evaluate_every == 0
            loss = evaluate(state) if evaluated else None
            progress.add(step, metrics, loss)
            stopping = stop.after_step()
            if last or stopping or step % config.checkpoint_every == 0:
                progress.flush()
                extra = {"seconds": progress.seconds()}
                cd.checkpoint.save(checkpoints, step, state, keep=2, extra=extra)
            if stopping:
                raise stop.interrupted(
                    f"{name} is saved at step {step} of {config.steps}; the same "
                    "command goes on from there"
                )
    if loss is None:  # an earlier run took the last step
        loss = evaluate(state)
    sent = cd.metrics.read(state.opt_state)
    # Every evaluation averages the parameters, as synchronous steps do gradients.
    each = sent["synchronous_bytes"] // sent["steps"]
    evaluations = math.ceil(config.steps / config.evaluate_every)
    return {
        "method": name,
        "replicas": config.replicas,
        "steps": config.steps,
        **{key: sent[key] for key in ("syncs", "bytes", "synchronous_bytes")},
        "validation_loss": report.finite(loss),
        "evaluation_bytes": evaluations * each,
        "divergence": report.finite(float(cd.replicas.divergence(state.params))),
        "seconds": round(progress.seconds(), 1),
    }


def _compile(step_fn: Any, state: TrainState, batch: jax.Array) -> None:
    """Compiles the local step and the sync step, which is first run much later."""
    local, sync = (step_fn.lower(state, batch, due=due) for due in (False, True))
    local.compile()
    # With a trigger that decides on every step they are one.
    if local.as_text() != sync.as_text():
        sync.compile()


def make_model(config: Config, corpus: Corpus) -> model.GPT:
    """The model of the configuration, over the tokens of the corpus."""
    return model.GPT(
        vocabulary=corpus.vocabulary,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        dtype=jnp.dtype(config.dtype),
    )


def initial_params(gpt: model.GPT, config: Config) -> Any:
    """The parameters before the first step."""
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    return jax.jit(gpt.init)(jax.random.key(config.seed), tokens)["params"]


def initial_state(gpt: model.GPT, name: str, config: Config) -> TrainState:
    """The state of one replica before the first step; equal parameters for all."""
    params = initial_params(gpt, config)
    tx = methods.METHODS[name].build(config, cd.replicas.AXIS)
    return TrainState.create(apply_fn=gpt.apply, params=params, tx=tx)


def make_train_step(gpt: model.GPT) -> Callable[[TrainState, jax.Array], Any]:
    """The step of one replica, on its own part of the batch."""

    def loss_fn(params: dict, tokens_BxT: jax.Array) -> jax.Array:
        return model.next_token_loss(gpt, params, tokens_BxT)

    def train_step(state: TrainState, tokens_BxT: jax.Array):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens_BxT)
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "sync": cd.metrics.observe(state.opt_state)}

    return train_step


def make_evaluation(
    gpt: model.GPT, config: Config, corpus: Corpus, mesh: Mesh
) -> Callable[[TrainState], float]:
    """The loss of the one model, the replicas' mean, on the fixed held-out batches."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec(cd.replicas.AXIS))
    loss_fn = jax.jit(lambda params, batch: model.next_token_loss(gpt, params, batch))
    count, sequences = config.evaluation_batches, config.replicas * config.batch
    length, rows = config.sequence_length, processes.rows(divided, sequences)
    batches = [
        corpus.validation_batch(index, count, sequences, length, rows)
        for index in range(count)
    ]
    batches = [processes.divided(batch, divided, sequences) for batch in batches]

    def evaluate(state: TrainState) -> float:
        params = cd.replicas.consensus(state.params)
        params = jax.device_put(params, everywhere)
        return float(np.mean([loss_fn(params, batch) for batch in batches]))

    return evaluate
