"""Sites that are killed at random instants: what is lost, and how long others wait.

    python benchmarks/sites/deaths.py --deaths 100 --grace 4 --period 0.5

Four sites are processes that train nothing: a step adds 1 to a site's own number. Any
of them is killed (`kill -9`) at a random instant, in its start as well, and started
again after a random pause. The store is a folder. `--rows` gets a line for each batch.

Afterwards `audit.py` reads every object, and sums are compared: the steps that each
site noted (a file that grows by a byte), those that commits count, and the model, in
which each site's number is the sum of its shares. Steps that a process took after its
last contribution, and one that was under way, may die with it. Nothing else may be
missing, and nothing may be there twice. A delay is by how much longer than usual the
rounds took in the `grace` and a period after a death.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import audit

NAMES = ("bern", "oslo", "paris", "rome")
EVERY = 2
# A process that has imported everything, of which sites are copies.
FORKS = multiprocessing.get_context("forkserver")


def site(folder: Path, name: str, grace: float, pause: float) -> None:
    """Steps until there is a file `over`; then leaves."""
    import numpy as np

    from curvadion_jax import sites

    given = {"every": EVERY, "max_lag": EVERY, "quorum": 2, "poll": 0.1}
    with sites.Site(folder / "run", name, grace=grace, **given) as run:
        params = run.start({"w": np.zeros(len(NAMES), np.float32)})
        with (folder / f"{name}.steps").open("ab", buffering=0) as steps:
            while not (folder / "over").exists():
                time.sleep(pause)
                steps.write(b".")
                params["w"][NAMES.index(name)] += 1
                params = run.sync(params)
        params = run.leave(params, timeout=60)
    end = [run.metrics.round, *map(float, params["w"])]
    (folder / f"{name}.end").write_text(json.dumps(end))


class Sites:
    """The processes of all sites."""

    def __init__(self, folder: Path, flags: argparse.Namespace) -> None:
        self._given = flags.grace, flags.period / EVERY
        self._folder, self.deaths, self.lives = folder, [], Counter()
        self.processes: dict[str, Any] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        given = self._folder, name, *self._given
        self.processes[name] = FORKS.Process(target=site, args=given)
        self.processes[name].start()
        self.lives[name] += 1

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()
        self.deaths.append(time.time())


def commits(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "run" / "commits").glob("*.json"))
    return [json.loads(x.read_text()) | {"time": x.stat().st_mtime} for x in files]


def run(folder: Path, flags: argparse.Namespace, seed: int, deaths: int) -> dict:
    draw = random.Random(seed)
    sites = Sites(folder, flags)
    while len(commits(folder)) < 3:  # all have begun
        time.sleep(0.1)
    for _ in range(deaths):
        time.sleep(draw.uniform(0, 4 * flags.period))
        name = draw.choice(NAMES)
        sites.kill(name)
        time.sleep(draw.uniform(0, 2 * flags.grace))
        sites.start(name)
        time.sleep(flags.grace + flags.period)
    (folder / "over").touch()
    for process in sites.processes.values():
        process.join(120)
    codes = [process.exitcode for process in sites.processes.values()]
    return judged(folder, flags, sites, codes)


def judged(folder: Path, flags: argparse.Namespace, sites: Sites, codes) -> dict:
    objects, wrong = audit.audit(folder / "run")
    wrong += [f"a site ended with {code}" for code in codes if code != 0]
    counted, expected = Counter(), Counter()
    for commit in commits(folder):
        wrong += [f"{x['name']} was rejected: {x['why']}" for x in commit["rejected"]]
        for x in commit["contributors"]:
            counted[x["name"]] += x["tokens"]
            share = x["weight"] / len(commit["roster"])
            expected[x["name"]] += share * x["tokens"]
    lost = {}
    for name in NAMES:
        taken = (folder / f"{name}.steps").stat().st_size
        lost[name] = taken - counted[name]
        # Steps since its last contribution, and one that was under way.
        most = (sites.lives[name] - 1) * 2 * EVERY
        if not 0 <= lost[name] <= most:
            wrong.append(f"{name} took {taken} steps, and {counted[name]:g} counted")
    ends = [json.loads(x.read_text()) for x in folder.glob("*.end")]
    last, *model = max(ends)
    if last != len(commits(folder)):
        wrong.append("the last site left before the last round")
    for name, x in zip(NAMES, model, strict=True):
        if not math.isclose(x, expected[name], rel_tol=1e-4):
            wrong.append(f"{name} is {x}, and by the commits {expected[name]}")
    times = [commit["time"] - sites.deaths[0] for commit in commits(folder)]
    deaths = [death - sites.deaths[0] for death in sites.deaths]
    found = delays(times, deaths, flags.grace + flags.period)
    return {
        "deaths": len(sites.deaths),
        "grace": flags.grace,
        "delays": [round(x, 2) for x in found],
        "rounds": len(commits(folder)),
        "objects": objects,
        "steps counted": round(sum(counted.values())),
        "steps that died with a process": round(sum(lost.values())),
        "wrong": wrong,
        "load": os.getloadavg()[0],
        "times of deaths": [round(x, 2) for x in deaths],
        "times of rounds": [round(x, 2) for x in times],
    }


def delays(times: list[float], deaths: list[float], window: float) -> list[float]:
    """Of each death, by how much longer than usual the rounds of a window took.

    Usual is the mean of rounds that begin when all windows are over.
    """
    gaps = [*pairwise(times)]
    since = lambda time: min((time - x for x in deaths if x < time), default=math.inf)
    usual = statistics.mean(end - start for start, end in gaps if since(start) > window)
    return [
        max(
            0.0,
            sum(
                end - start - usual
                for start, end in gaps
                if end > death and start < death + window
            ),
        )
        for death in deaths
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--batch", type=int, default=20, help="deaths of one run")
    parser.add_argument("--grace", type=float, default=4.0)
    parser.add_argument("--period", type=float, default=0.5, help="seconds of a round")
    parser.add_argument("--rows", type=Path, default=Path("out/deaths.jsonl"))
    flags = parser.parse_args()
    flags.rows.parent.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    FORKS.set_forkserver_preload(["numpy", "curvadion_jax.sites", "obstore.store"])
    rows = []
    for seed, first in enumerate(range(0, flags.deaths, flags.batch)):
        count = min(flags.batch, flags.deaths - first)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(Path(folder), flags, seed, count))
        with flags.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(f"{count} deaths, faults: {rows[-1]['wrong']}", flush=True)
    found = [x for row in rows for x in row["delays"]]
    print(
        f"{len(found)} deaths, grace {flags.grace:g} s: delayed the others by "
        f"{statistics.median(found):.2f} s in the median, {max(found):.2f} s at most; "
        f"{sum(len(row['wrong']) for row in rows)} faults"
    )


if __name__ == "__main__":
    main()
