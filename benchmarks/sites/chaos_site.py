"""The processes of `chaos.py`: a site, and a judge."""

import errno
import json
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import one_site
import optax
import train
from chaos import EVERY
from config import Config
from data import load
from faulty import FaultyStore
from obstore.store import LocalStore

import curvadion_jax as cd

CONFIG = Config(
    layers=2,
    width=32,
    heads=2,
    batch=4,
    sequence_length=64,
    steps=600,
    evaluate_every=100,
    evaluation_batches=4,
    checkpoint_every=EVERY,
    replicas=4,
)
JOIN: dict[str, Any] = {
    "every": EVERY,
    "quorum": 2,
    "grace": 3.0,
    "poll": 0.25,
    "max_lag": 6 * EVERY,
}


class FlaggedStore(FaultyStore):
    """Every tenth request fails; all while `cut` is there, writes while `full` is."""

    def __init__(self, folder: Path, faulty: bool):
        (folder / "run").mkdir(exist_ok=True)
        store = LocalStore(folder / "run")
        super().__init__(store, refuse=0.1 if faulty else 0.0, seed=time.time_ns())
        self._folder = folder

    def put(self, key: str, data: bytes, **options: Any) -> Any:
        if (self._folder / "full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().put(key, data, **options)

    def _ask(self, request: Any) -> Any:
        self.cut_off = (self._folder / "cut").exists()
        return super()._ask(request)


class Paced:
    """Steps at their times; SIGTERM is the end."""

    def __init__(self, name: str, folder: Path, pace: float):
        self._ready, self._pace, self.ended = folder / f"{name}.ready", pace, False
        self._next = time.monotonic()
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self.ended = True

    def __iter__(self):
        step = 0
        while not self.ended:
            step += 1
            yield step
            if step == EVERY + 5:  # it has contributed
                self._ready.touch()
            self._next = max(self._next + self._pace, time.monotonic())
            time.sleep(max(0.0, self._next - time.monotonic()))


def store_of(folder: Path) -> FlaggedStore:
    faults = json.loads((folder / "faults.json").read_text())
    return FlaggedStore(folder, "store" in faults)


def started(folder: Path, name: str, params: Any) -> tuple[cd.sites.Site, Any]:
    """A site, and the run's parameters, once the store answers."""
    run = cd.sites.Site(store_of(folder), name, **one_site.outer_side(), **JOIN)
    while True:
        try:
            return run, run.start(params)
        except OSError as error:
            print(error, flush=True)
            time.sleep(1)


def parts() -> tuple[Any, Any, Any, Any]:
    corpus = load(None)
    gpt = train.make_model(CONFIG, corpus)
    params = train.initial_params(gpt, CONFIG)
    return corpus, gpt, params, one_site.inner_optimizer(gpt, CONFIG, params)


def site(name: str, folder: Path, pace: float) -> None:
    """One site until SIGTERM."""
    corpus, gpt, params, tx = parts()
    opt_state = tx.init(params)

    @jax.jit
    def step_fn(params, opt_state, tokens):
        loss_fn = lambda p: train.model.next_token_loss(gpt, p, tokens)
        grads = jax.grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    place, began = zlib.crc32(name.encode()), time.time_ns() % 2**32
    checkpoints = folder / "checkpoints" / name
    before = cd.checkpoint.latest_step(checkpoints) or 0
    if before:
        opt_state = cd.checkpoint.restore(checkpoints, opt_state, before)
    paced = Paced(name, folder, pace)
    run, params = started(folder, name, params)
    with run:
        for step in paced:
            seed: Any = (began, step, place)
            batch = corpus.training_batch(seed, CONFIG.batch, CONFIG.sequence_length)
            params, opt_state = step_fn(params, opt_state, batch)
            params = jax.block_until_ready(run.sync(params))
            if step % EVERY == 0:
                cd.checkpoint.save(checkpoints, before + step, opt_state, keep=2)
        params = run.leave(params)
        end = {"round": run.metrics.round, "digest": one_site._digest(params)}
        print(run.metrics, flush=True)
    (folder / f"{name}.end").write_text(json.dumps(end))


def judge(name: str, folder: Path, pace: float) -> None:
    """The loss of a run's newest model, as a newcomer gets it."""
    del pace
    corpus, gpt, params, _ = parts()
    store = LocalStore(folder / "run")
    with cd.sites.Site(store, name, **one_site.outer_side(), **JOIN) as run:
        print(one_site._evaluation(gpt, CONFIG, corpus)(run.start(params)))
