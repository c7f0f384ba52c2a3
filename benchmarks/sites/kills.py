"""What a kill costs in loss: 4 sites, some of them struck, every request in order.

    python benchmarks/sites/kills.py --out out/kills.json

No threads and no clocks, as in `delays.py`: a contribution every 20 steps that lands 4
steps later. A struck site takes no steps for 24, its restart, and then it has

- stopped: all that it had;
- killed: the parameters of the run, the optimizer's state of its last checkpoint, and
  owes nothing;
- and, one by one, what else it would have if that were in the run or in a checkpoint.

Runs that `--out` holds are not made again.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import delays
import jax
import jax.numpy as jnp
import numpy as np
import one_site
import optax
import train
from data import load

SITES, EVERY, DELAY, AWAY = 4, 20, 4, 24
CONFIG = dataclasses.replace(delays.CONFIG, replicas=SITES, steps=480)
# Steps between which sites are struck, and how far each strike is moved at random.
FIRST, LAST, MOVED = 60, 440, 20
KINDS = ("stopped", "killed", "killed, owes on", "killed, optimizer on")
CASES = [("none", 0), ("stopped", 4), ("killed", 4), *((kind, 12) for kind in KINDS)]
SEEDS = range(3)


class Struck(delays.Sites):
    """The sites, and what becomes of one that is struck.

    Attributes:
        away: Steps for which each takes none.
        steps: That each has taken since its last contribution.
    """

    def __init__(self, kind: str, params: Any):
        super().__init__(delays.Case(present=1), params, SITES)
        self._kind = kind
        self.away, self.steps = np.zeros(SITES, int), np.zeros(SITES, int)

    def bring(self, params: Any, steps: int) -> None:
        """Every site that is there sends what it has."""
        del steps
        leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
        self._anchor, self._captured = self.followers[0].outer.anchor, {}
        for index in np.flatnonzero((self.steps > 0) & (self.away == 0)):
            follower, own = self.followers[index], [x[index] for x in leaves]
            follower.prepare(own, self._anchor, int(self.steps[index]))
            follower.send()
            self._captured[index] = own
            self.steps[index] = 0

    def strike(self, index: int, under_way: bool, params: Any, states: Any, saved: Any):
        """Parameters and optimizers' states after it."""
        self.away[index] = AWAY
        if not self._kind.startswith("killed"):
            return params, states
        follower = self.followers[index]
        outer = follower.outer.anchor
        leaves, structure = jax.tree.flatten(params)
        leaves = [x.at[index].set(y) for x, y in zip(leaves, outer, strict=True)]
        self.steps[index] = 0
        if under_way and index in self._captured:  # what it had sent counts
            self._captured[index] = list(outer)
        if self._kind != "killed, owes on":
            follower._residual = zeros = follower.model.zeros()
            if (own := follower.contribution) is not None:
                follower.contribution = own._replace(residual=zeros)
        if self._kind != "killed, optimizer on":
            states = only(np.arange(SITES) == index, saved, states)
        return jax.tree.unflatten(structure, leaves), states


@jax.jit
def only(mask: Any, new: Any, old: Any) -> Any:
    """The new state of the sites of a mask, and the old of the others."""

    def chosen(x, y):
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(chosen, new, old)


def strikes(kills: int, seed: int) -> dict[int, int]:
    """At which step who is struck."""
    draw = np.random.default_rng(seed + 100)
    steps = np.linspace(FIRST, LAST, kills).round() + draw.integers(0, MOVED, kills)
    return {int(step): int(draw.integers(SITES)) for step in steps}


def run(kind: str, kills: int, seed: int) -> dict[str, Any]:
    """The loss of the common model after the last round, and the steps taken."""
    config = dataclasses.replace(CONFIG, seed=seed)
    corpus = load(None)
    gpt = train.make_model(config, corpus)
    tx = one_site.inner_optimizer(config)
    sites = Struck(kind, train.initial_state(gpt, "local_muon", config).params)
    params = sites.initial()
    states = saved = jax.vmap(tx.init)(params)

    @jax.jit
    @jax.vmap
    def step_fn(params, state, tokens):
        loss_fn = lambda p: train.model.next_token_loss(gpt, p, tokens)  # noqa: E731
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    at, since, under_way, taken = strikes(kills, seed), 0, None, 0
    for step in range(1, config.steps + 1):
        batch = corpus.training_batch(
            (seed, step), SITES * config.batch, config.sequence_length
        )
        here = sites.away == 0
        new = step_fn(params, states, batch.reshape(SITES, config.batch, -1))
        params, states = only(here, new, (params, states))
        sites.away = np.maximum(sites.away - 1, 0)
        sites.steps += here
        taken, since = taken + int(here.sum()), since + 1
        if step % EVERY == 0:
            saved = only(here, states, saved)
        if under_way is None and since >= EVERY:
            sites.bring(params, since)
            under_way, since = step + DELAY, 0
        if under_way is not None and step >= under_way:
            params, under_way = sites.land(params), None
        if step in at:
            params, states = sites.strike(
                at[step], under_way is not None, params, states, saved
            )
    loss = one_site._evaluation(gpt, config, corpus)(sites.model())
    return {"kind": kind, "kills": kills, "seed": seed, "taken": taken, "loss": loss}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| what is lost | kills | steps | mean loss | each seed |",
        "|---" * 5 + "|",
    ]
    for kind, kills in CASES:
        found = [r for r in rows if (r["kind"], r["kills"]) == (kind, kills)]
        losses = [row["loss"] for row in found]
        steps = np.mean([row["taken"] for row in found])
        lines.append(
            f"| {kind} | {kills} | {steps:.0f} | {np.mean(losses):.4f} | "
            f"{', '.join(f'{loss:.4f}' for loss in losses)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/kills.json"))
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(flags.out.read_text()) if flags.out.exists() else []
    for seed in SEEDS:
        for kind, kills in CASES:
            if (kind, kills, seed) not in [
                (row["kind"], row["kills"], row["seed"]) for row in rows
            ]:
                rows.append(run(kind, kills, seed))
                flags.out.write_text(json.dumps(rows, indent=2))
    print(table(rows))


if __name__ == "__main__":
    main()
