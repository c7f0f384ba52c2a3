"""Step time of a site with a slow link before its store, beside one without.

    python benchmarks/sites/links.py --out out/links.json
    sudo "$(which python)" benchmarks/sites/links.py --wan --out out/links.json

The two take their steps in turn in one program, so that whatever else the machine does
meets both alike. Each has a run of its own. The link is `FaultyStore`'s: every request
takes the time of a round trip, and bytes as long as they take at the rate. With `--wan`
it is one of `benchmarks/wan`, of real TCP, and an S3 server (moto's) is at its far end.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
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
from line import Conditions
from link import open_link
from namespaces import address, enter, refusal
from obstore.store import MemoryStore

import curvadion_jax as cd

# Two rounds have landed before times are taken: programs are compiled.
EVERY, WARMUP = 100, 300
RATE, ROUND_TRIP = 10e6, 0.1
SERVER = f"http://{address(1)}:9000"
FORMS = {"2 bits": cd.compressors.quantize(2), "float32": cd.compressors.exact()}


@contextlib.contextmanager
def served() -> Iterator[Path]:
    """An S3 server at the far end of a link; the namespace of the near one."""
    server = [sys.executable, "-m", "moto.server", "-H", address(1), "-p", "9000"]
    with open_link(Conditions(RATE, ROUND_TRIP)) as link:
        near, far = link.namespaces
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(server, preexec_fn=lambda: enter(far, 1), **quiet)
        try:
            yield near
        finally:
            process.kill()
            process.wait()


def bucket(name: str) -> str:
    """A bucket of the server's, once that answers."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{SERVER}/{name}", method="PUT")
            urllib.request.urlopen(request, timeout=10).close()
            break
        time.sleep(0.2)
    os.environ |= {
        "AWS_ENDPOINT_URL": SERVER,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    return f"s3://{name}/run"


def run(form: str, steps: int, wan: bool) -> dict[str, Any]:
    """Mean and median step times of both sites, and what the first has sent."""
    options: dict[str, Any] = {"seconds": ROUND_TRIP, "bytes_per_second": RATE / 8}
    behind = bucket("bucket") if wan else FaultyStore(MemoryStore(), **options)
    corpus = load(None)
    gpt = train.make_model(CONFIG, corpus)
    tx = one_site.inner_optimizer(CONFIG)
    start = train.initial_state(gpt, "local_muon", CONFIG).params

    @jax.jit
    def step_fn(params, opt_state, tokens):
        loss_fn = lambda p: train.model.next_token_loss(gpt, p, tokens)  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    stores = behind, MemoryStore()
    options = {"every": EVERY, "poll": 0.25, "compressor": FORMS[form]}
    options["max_lag"] = 8 * EVERY
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
        "link": "emulated" if wan else "waits",
        "steps": steps,
        "mean ratio": float(slow.mean() / fast.mean()),
        "median ratio": float(np.median(slow) / np.median(fast)),
        "step, ms": float(1000 * fast.mean()),
        "rounds": metrics[0].round,
        "waited, s": metrics[0].blocked,
        "bytes up": metrics[0].bytes_up,
    }


def over_the_link(form: str, steps: int) -> dict[str, Any]:
    """`run` in a process of its own, at the near end."""
    with served() as near:
        command = [sys.executable, __file__, "--child", form, "--steps", str(steps)]
        found = subprocess.run(
            command, preexec_fn=lambda: enter(near, 0), stdout=subprocess.PIPE
        )
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/links.json"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--wan", action="store_true", help="real TCP; as root")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(run(flags.child, flags.steps, wan=True)))
        return
    if flags.wan and (why := refusal()):
        parser.error(why)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(flags.out.read_text()) if flags.out.exists() else []
    for form in FORMS:
        kind = form, "emulated" if flags.wan else "waits"
        if kind not in [(row["form"], row["link"]) for row in rows]:
            found = over_the_link if flags.wan else lambda *a: run(*a, wan=False)
            rows.append(found(form, flags.steps))
            flags.out.write_text(json.dumps(rows, indent=2))
    print("| link | form | mean ratio | median | step, ms | rounds | waited, s |")
    print("|---" * 7 + "|")
    for row in rows:
        print(
            f"| {row['link']} | {row['form']} | {row['mean ratio']:.3f} | "
            f"{row['median ratio']:.3f} | {row['step, ms']:.0f} | {row['rounds']} | "
            f"{row['waited, s']:.1f} |"
        )


if __name__ == "__main__":
    main()
