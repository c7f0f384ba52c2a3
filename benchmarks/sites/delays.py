"""What delays and absent sites cost in loss: 8 sites, every request made in order.

    python benchmarks/sites/delays.py --out out/delays.json

No threads and no clocks: a contribution is taken after `EVERY` steps at the earliest
and lands so many steps later, and of each round a random part of the sites is in time.
So the numbers are the same on every run. Runs that `--out` holds are not made again.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import one_site
import optax
import train
from config import Config
from data import load
from obstore.store import MemoryStore

from curvadion_jax import compressors
from curvadion_jax.sites import _run
from curvadion_jax.sites._follower import Follower, Settings
from curvadion_jax.sites._model import Model
from curvadion_jax.sites._store import Store

SITES, EVERY = 8, 7
CONFIG = Config(
    layers=2,
    width=32,
    heads=2,
    batch=4,
    sequence_length=64,
    steps=150,
    evaluate_every=150,
    evaluation_batches=8,
    checkpoint_every=150,
    replicas=SITES,
)
OUTERS = {"1.0, 0.4": (1.0, 0.4), "1.0, 0": (1.0, None)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Steps of delay, sites in time, share of the progress kept, and the outer step."""

    delay: int = 0
    present: int = SITES
    keep: float = 1.0
    outer: str = "1.0, 0.4"


CASES = [
    Case(),
    *(Case(delay=d) for d in (7, 14, 35)),
    *(Case(present=n) for n in (6, 4)),
    *(Case(delay=7, keep=share) for share in (0.5, 0.0)),
    *(Case(delay=d, outer="1.0, 0") for d in (0, 7, 14, 35)),
    Case(delay=7, present=6),
    *(Case(delay=d, keep=0.5) for d in (14, 35)),
    *(Case(delay=d, present=4) for d in (7, 14, 35)),
    *(Case(delay=d, present=6) for d in (14, 35)),
    *(Case(delay=d) for d in (21, 28)),
    *(Case(present=n) for n in (7, 5)),
    Case(delay=35, present=4, keep=0.5),
    Case(delay=35, present=4, outer="1.0, 0"),
]


class Sites:
    """All sites: their parameters as arrays [SITES, ...], and what each follows."""

    def __init__(self, case: Case, params: Any, count: int = SITES):
        settings = Settings(
            every=EVERY,
            quorum=case.present,
            grace=0.0,
            max_lag=10**9,
            keep=case.keep,
            snapshot_every=10**9,
        )
        rate, momentum = OUTERS[case.outer]
        outer = optax.sgd(rate, momentum, nesterov=momentum is not None)
        form, store = compressors.quantize(2), MemoryStore()
        leaves, self._structure = jax.tree.flatten(params)
        self._leaves = [np.asarray(x) for x in leaves]
        self._case, self._random = case, np.random.default_rng(0)
        self.followers = []
        for index in range(count):
            wrapped = Store(store)
            model = Model(params, outer, form.codec)
            name = f"site{index}"
            number = _run.join(wrapped, name)
            follower = Follower(wrapped, model, name, number, settings)
            follower.on_outcome = lambda own, why: None
            self.followers.append(follower)
            self.followers[-1].start(self._leaves)
        self._tokens = [0] * count

    def initial(self) -> Any:
        stacked = [np.stack([x] * len(self.followers)) for x in self._leaves]
        return jax.tree.unflatten(self._structure, stacked)

    def bring(self, params: Any, steps: int) -> None:
        """Every site that is in time sends what it has."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
        self._anchor = self.followers[0].outer.anchor
        chosen = self._random.permutation(SITES)[: self._case.present]
        self._captured = {}
        self._tokens = [count + steps for count in self._tokens]
        for index in sorted(chosen):
            follower, own = self.followers[index], [x[index] for x in leaves]
            follower.prepare(own, self._anchor, self._tokens[index])
            follower.send()
            self._captured[index] = own
            self._tokens[index] = 0

    def land(self, params: Any) -> Any:
        """The round is committed, and every site takes it over."""
        assert self.followers[min(self._captured)].propose()
        for follower in self.followers:
            assert follower.advance()
        new = self.followers[0].outer.anchor
        leaves, structure = jax.tree.flatten(params)
        moved = []
        for place, x in enumerate(leaves):
            rows = []
            for index, now in enumerate(np.asarray(x)):
                own = self._captured.get(index)
                base = self._anchor[place] if own is None else own[place]
                share = 1.0 if own is None else self._case.keep
                rows.append(new[place] + np.float32(share) * (now - base))
            moved.append(np.stack(rows))
        return jax.tree.unflatten(structure, moved)

    def model(self) -> Any:
        return jax.tree.unflatten(self._structure, self.followers[0].outer.anchor)


def run(case: Case, config: Config) -> float:
    """The loss of the common model after the last round."""
    corpus = load(None)
    gpt = train.make_model(config, corpus)
    tx = one_site.inner_optimizer(config)
    start = train.initial_state(gpt, "local_muon", config).params
    sites = Sites(case, start)
    params = sites.initial()
    states = jax.vmap(tx.init)(params)

    @jax.jit
    @jax.vmap
    def step_fn(params, state, tokens):
        loss_fn = lambda p: train.model.next_token_loss(gpt, p, tokens)  # noqa: E731
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    since, under_way = 0, None
    for step in range(1, config.steps + 1):
        seed = (config.seed, step)
        batch = corpus.training_batch(
            seed, SITES * config.batch, config.sequence_length
        )
        params, states = step_fn(params, states, batch.reshape(SITES, config.batch, -1))
        since += 1
        if under_way is None and since >= EVERY:
            sites.bring(params, since)
            since, under_way = 0, step + case.delay
        if under_way is not None and step >= under_way:
            params, under_way = sites.land(params), None
    return one_site._evaluation(gpt, config, corpus)(sites.model())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/delays.json"))
    parser.add_argument("--steps", type=int, default=CONFIG.steps)
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(flags.out.read_text()) if flags.out.exists() else []
    for case in CASES:
        given = dataclasses.asdict(case) | {"steps": flags.steps}
        if not any(given.items() <= row.items() for row in rows):
            loss = run(case, dataclasses.replace(CONFIG, steps=flags.steps))
            rows.append(given | {"loss": loss})
            flags.out.write_text(json.dumps(rows, indent=2))
    print("| delay, steps | of 8 in time | kept | outer step | loss |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['delay']} | {row['present']} | {row['keep']:g} | {row['outer']} | "
            f"{row['loss']:.4f} |"
        )


if __name__ == "__main__":
    main()
