"""The training loop: several methods in a row, on the same data in the same order.

What differs between replicas has a row for each of them, [R, ...]. `make_train_step`
is a plain step under `jax.jit`, but for one line: the loss and the gradients of one
replica are mapped over the rows. What is sent, and when, is the optimizer's business.
"""

import dataclasses
import functools
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
from jax.sharding import Mesh

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
    # How often a run is saved changes nothing in it, and replicas may come and go.
    del settings["checkpoint_every"], settings["replicas"]
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
    state = initial_state(gpt, name, config, mesh)
    state, start, seconds = _restored(out / "checkpoints" / name, state)
    held_out = validation_batches(config, corpus, mesh)
    with journal.compiling(name):
        step_fn = jax.jit(make_train_step(gpt, mesh), donate_argnums=0)
        # Compiled for these very arrays: a step that were to compile again would fail.
        step_fn = step_fn.lower(state, held_out[0]).compile()
        evaluate = make_evaluation(gpt, held_out, mesh)
        loss = evaluate(state.params)
    if name == "local_muon" and processes.is_first():
        print("What a step sends between replicas:")
        print(cd.replicas.audit(step_fn, mesh))
    sequences = config.replicas * config.batch
    with processes.together(
        lambda: journal.Progress(name, config.steps, out, start, seconds)
    ) as progress:
        for step in range(start + 1, config.steps + 1):
            seed = (config.seed, step)
            batch = corpus.training_batch(seed, sequences, config.sequence_length)
            state, metrics = step_fn(state, cd.replicas.split(batch, mesh))
            last = step == config.steps
            evaluated = last or step % config.evaluate_every == 0
            loss = evaluate(state.params) if evaluated else loss
            progress.add(step, metrics, loss if evaluated else None)
            stopping = stop.after_step()
            if last or stopping or step % config.checkpoint_every == 0:
                progress.flush()
                extra = {"seconds": progress.seconds()}
                checkpoints = out / "checkpoints" / name
                cd.checkpoint.save(checkpoints, step, state, keep=2, extra=extra)
            if stopping:
                raise stop.interrupted(
                    f"{name} is saved at step {step} of {config.steps}; the same "
                    "command goes on from there"
                )
    sent = cd.metrics.read(state.opt_state)
    # Every evaluation averages the parameters, as synchronous steps do gradients.
    each = sent["synchronous_bytes"] // sent["steps"]
    evaluations = math.ceil(config.steps / config.evaluate_every)
    return {
        "method": name,
        "validation_loss": report.finite(loss),
        **{key: sent[key] for key in ("share", "bytes", "synchronous_bytes", "syncs")},
        "steps": config.steps,
        "replicas": config.replicas,
        "evaluation_bytes": evaluations * each,
        "divergence": report.finite(float(cd.replicas.divergence(state.params))),
        "seconds": round(progress.seconds(), 1),
    }


def _restored(checkpoints: Path, state: TrainState) -> tuple[TrainState, int, float]:
    """The latest checkpoint, of any number of replicas: state, step, and seconds."""
    start = cd.checkpoint.latest_step(checkpoints) or 0
    start = int(processes.from_first(np.array(start)))
    if not start:
        return state, 0, 0.0
    state = cd.checkpoint.restore(checkpoints, state, start, resize=True)
    return state, start, cd.checkpoint.read_extra(checkpoints, start)["seconds"]


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
    """The parameters of one replica before the first step."""
    tokens = jnp.zeros((1, config.sequence_length), jnp.int32)
    return jax.jit(gpt.init)(jax.random.key(config.seed), tokens)["params"]


def find_matrices(
    gpt: model.GPT, config: Config, params: Any
) -> cd.dimension_numbers.Partition:
    """Which parameters Muon and Dion train: the program of the loss tells."""
    tokens = jax.ShapeDtypeStruct((2, config.sequence_length + 1), jnp.int32)
    loss_fn = functools.partial(model.next_token_loss, gpt)
    return cd.dimension_numbers.from_loss(loss_fn, params, tokens)


def initial_state(gpt: model.GPT, name: str, config: Config, mesh: Mesh) -> TrainState:
    """The state before the first step; equal parameters for all replicas."""
    params = initial_params(gpt, config)
    partition = find_matrices(gpt, config, params)
    state = TrainState.create(
        apply_fn=gpt.apply,
        params=cd.replicas.replicate(params, mesh),
        tx=methods.METHODS[name].build(config, mesh, partition),
    )
    return cd.replicas.place(state, mesh)  # the number of the step


def make_train_step(gpt: model.GPT, mesh: Mesh) -> Callable[..., Any]:
    """The step of all replicas; tokens are [R, B, T + 1], and losses [R]."""

    def loss_fn(params: Any, tokens_BxT: jax.Array) -> jax.Array:
        return model.next_token_loss(gpt, params, tokens_BxT)

    def train_step(state: TrainState, tokens: jax.Array):
        loss, grads = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)(
            state.params, tokens
        )
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "sync": cd.metrics.observe(state.opt_state)}

    return train_step


def validation_batches(config: Config, corpus: Corpus, mesh: Mesh) -> list[jax.Array]:
    """The fixed held-out batches, [R, B, T + 1] each."""
    count, sequences = config.evaluation_batches, config.replicas * config.batch
    batches = [
        corpus.validation_batch(index, count, sequences, config.sequence_length)
        for index in range(count)
    ]
    return [cd.replicas.split(batch, mesh) for batch in batches]


def make_evaluation(
    gpt: model.GPT, held_out: list[jax.Array], mesh: Mesh
) -> Callable[[Any], float]:
    """From rows of parameters to the loss of the one model, the replicas' mean."""

    def loss_fn(tokens_BxT: jax.Array, params: Any) -> jax.Array:
        return model.next_token_loss(gpt, params, tokens_BxT)

    # Each replica reads its part of a batch, all with the same parameters.
    losses = jax.jit(cd.replicas.map(loss_fn, mesh))

    def evaluate(rows: Any) -> float:
        params = cd.replicas.consensus(rows)
        each = [losses(batch, params=params) for batch in held_out]
        return float(np.mean(processes.mean_over_replicas(each)))

    return evaluate
