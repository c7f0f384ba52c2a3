"""One site of a run of several: an ordinary training loop, and two lines for the run.

The same command in another terminal, or on another machine, with another name, is a
further site. Each has its own place in the data; all have one model.
"""

import contextlib
import functools
import json
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import journal
import methods
import numpy as np
import optax
import report
import train
from config import Config, UserError
from data import load

import curvadion_jax as cd

# Steps between contributions, unless told otherwise: with 2 bits 1% of the bytes.
EVERY = 7


def run(config: Config, name: str, url: Any, out: Path, **join: Any) -> float:
    """Take this site's steps, or what is left of them after a crash.

    Args:
        config: The model, the data, and the steps of this site; `batch` is its own.
        name: Of the site.
        url: Of the run, or a store.
        out: Directory for the journal and the optimizer's state.
        **join: Further arguments of `cd.sites.Site`.

    Returns:
        The loss of the common model on the held-out text.

    Raises:
        UserError: The run does not take this site, and says why.
        Interrupted: Ctrl-C or SIGTERM; the same call continues.
        OSError: The store or the directory cannot be used.
    """
    corpus = load(config.data)
    gpt = train.make_model(config, corpus)
    params = train.initial_params(gpt, config)
    tx = inner_optimizer(gpt, config, params)
    opt_state = tx.init(params)
    evaluate = _evaluation(gpt, config, corpus)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step_fn(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(
            lambda p: train.model.next_token_loss(gpt, p, tokens)
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    checkpoints = out / "checkpoints" / name
    start = cd.checkpoint.latest_step(checkpoints) or 0
    if start:
        opt_state = cd.checkpoint.restore(checkpoints, opt_state, start)
    out.mkdir(parents=True, exist_ok=True)
    place, tokens = zlib.crc32(name.encode()), config.batch * config.sequence_length
    kept = closing(journal.Journal(out / f"{name}.jsonl", start))
    joined = _joined(url, name, **join)
    with kept as lines, joined as site, journal.stop_on_signal() as stop:
        with _told_to_the_user():
            params = site.start(params)
        if not start:
            opt_state = tx.init(params)  # the run's, in place of this site's own
        for step in range(start + 1, config.steps + 1):
            seed = (config.seed, step, place)
            batch = corpus.training_batch(seed, config.batch, config.sequence_length)
            params, opt_state, loss = step_fn(params, opt_state, batch)
            params = site.sync(params, tokens=tokens)
            line = {"step": step, "loss": float(loss), "time": time.time()}
            if step % config.evaluate_every == 0:
                line["validation_loss"] = evaluate(params)
                print(f"{name} {json.dumps(line | site.metrics._asdict())}", flush=True)
            lines.write(line | site.metrics._asdict())
            stopping = stop.after_step()
            last = step == config.steps
            if last or stopping or step % config.checkpoint_every == 0:
                # The parameters are in the run.
                cd.checkpoint.save(checkpoints, step, opt_state, keep=2)
            if stopping:
                raise stop.interrupted(
                    f"{name} stopped at step {step} of {config.steps}; the same "
                    "command goes on from there"
                )
        with _told_to_the_user():  # if nothing of this site has counted
            params = site.leave(params)
        lines.write({"step": config.steps, "left": True, **site.metrics._asdict()})
    loss = evaluate(params)
    report.write_json(
        out / f"{name}.json",
        {
            "validation_loss": loss,
            "steps": config.steps,
            "digest": _digest(params),
            **site.metrics._asdict(),
        },
    )
    found = site.metrics
    print(f"{name}: {loss:.4f} nats per byte on held-out text, {found}")
    print(f"{name}: syncs: {found.counted} of {found.contributions} counted")
    return loss


@contextlib.contextmanager
def _told_to_the_user() -> Iterator[None]:
    """What the run refuses is for the user to mend, and no fault of the program."""
    try:
        yield
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _joined(url: Any, name: str, **join: Any) -> Iterator[cd.sites.Site]:
    with _told_to_the_user():
        joined = cd.sites.Site(url, name, **join)
    with joined as site:
        yield site


def inner_optimizer(
    gpt: Any, config: Config, params: Any
) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for the rest: `local_muon`'s step, that never syncs."""
    return methods.local_muon(
        config,
        dimension_numbers=train.find_matrices(gpt, config, params),
        trigger=cd.triggers.never(),
        synchronizer=cd.synchronizers.average_gradients(),
    )


def outer_side() -> dict[str, Any]:
    """The outer side of `local_muon`: 2 bits, and a Nesterov step."""
    return {
        "outer": optax.sgd(1.0, momentum=0.4, nesterov=True),
        "compressor": cd.compressors.quantize(2),
    }


def _evaluation(gpt: Any, config: Config, corpus: Any) -> Any:
    loss_fn = jax.jit(lambda p, batch: train.model.next_token_loss(gpt, p, batch))
    # The text that a run of replicas is evaluated on, in batches of a site's size.
    count, length = config.replicas * config.evaluation_batches, config.sequence_length
    batches = [
        corpus.validation_batch(index, count, config.batch, length)
        for index in range(count)
    ]
    return lambda params: float(np.mean([loss_fn(params, b) for b in batches]))


def _digest(params: Any) -> str:
    numbers = [zlib.crc32(np.asarray(x).tobytes()) for x in jax.tree.leaves(params)]
    return f"{zlib.crc32(np.array(numbers, np.uint32).tobytes()):08x}"
