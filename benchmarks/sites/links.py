"""Step time of a site with a slow link before its store, beside one without.

    python benchmarks/sites/links.py --out out/links.json

The two take their steps in turn in one program, so that whatever else the machine does
meets both alike. Each has a run of its own. The link is `FaultyStore`'s: every request
takes the time of a round trip, and bytes as long as they take at the rate.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import one_site
import optax
import train
from chaos_site import CONFIG
from data import load
from faulty import FaultyStore
from obstore.store import MemoryStore

import curvadion_jax as cd

EVERY, WARMUP = 100, 100
LINK = {"seconds": 0.1, "bytes_per_second": 10e6 / 8}
FORMS = {"2 bits": cd.compressors.quantize(2), "float32": cd.compressors.exact()}


def run(form: str, steps: int) -> dict[str, Any]:
    """Mean and median step times of both sites, and what the first has sent."""
    corpus = load(None)
    gpt = train.make_model(CONFIG, corpus)
    tx = one_site.inner_optimizer(CONFIG)
    start = train.initial_state(gpt, "local_muon", CONFIG).params

    @jax.jit
    def step_fn(params, opt_state, tokens):
        loss_fn = lambda p: train.model.next_token_loss(gpt, p, tokens)  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    stores = FaultyStore(MemoryStore(), **LINK), MemoryStore()
    options = {"every": EVERY, "poll": 0.25, "compressor": FORMS[form]}
    sites = [cd.sites.join(store, "one", **options) for store in stores]
    states = [(site.start(start), tx.init(start)) for site in sites]
    times: list[list[float]] = [[], []]
    for step in range(steps + WARMUP):
        seed = (CONFIG.seed, step)
        batch = corpus.training_batch(seed, CONFIG.batch, CONFIG.sequence_length)
        for index in (0, 1) if step % 2 else (1, 0):
            began = time.perf_counter()
            params, opt_state = step_fn(*states[index], batch)
            params = jax.block_until_ready(sites[index].sync(params))
            states[index] = params, opt_state
            times[index].append(time.perf_counter() - began)
    metrics = [site.metrics for site in sites]
    for site in sites:
        site.close()
    slow, fast = (np.array(x[WARMUP:]) for x in times)
    return {
        "form": form,
        "steps": steps,
        "mean ratio": float(slow.mean() / fast.mean()),
        "median ratio": float(np.median(slow) / np.median(fast)),
        "step, ms": float(1000 * fast.mean()),
        "rounds": metrics[0].round,
        "waited, s": metrics[0].blocked,
        "bytes up": metrics[0].bytes_up,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/links.json"))
    parser.add_argument("--steps", type=int, default=1500)
    flags = parser.parse_args()
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(flags.out.read_text()) if flags.out.exists() else []
    for form in FORMS:
        if form not in [row["form"] for row in rows]:
            rows.append(run(form, flags.steps))
            flags.out.write_text(json.dumps(rows, indent=2))
    print("| form | mean ratio | median ratio | step, ms | rounds | waited, s |")
    print("|---" * 6 + "|")
    for row in rows:
        print(
            f"| {row['form']} | {row['mean ratio']:.3f} | {row['median ratio']:.3f} | "
            f"{row['step, ms']:.0f} | {row['rounds']} | {row['waited, s']:.1f} |"
        )


if __name__ == "__main__":
    main()
