"""How long a death delays the other sites.

    python benchmarks/sites/deaths.py --deaths 20 --grace 3 --period 0.5

Three sites in threads of one process, in lock step, with a folder; a step is a pause.
The third dies at random instants, as a killed process does: it requests nothing more.
Then it joins again under its name. A delay is how much longer rounds took than usual.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp

from curvadion_jax import sites


class Died(Exception):
    """The site's process is gone."""


class Mortal:
    """A store of a site that may die, after which no request returns."""

    def __init__(self, folder: str) -> None:
        from obstore.store import LocalStore

        self._store, self.dead = LocalStore(folder), threading.Event()

    def __getattr__(self, name: str):
        if self.dead.is_set():
            raise Died
        return getattr(self._store, name)


def train(store, name, flags, is_over) -> None:
    options = {"every": 1, "max_lag": 0, "quorum": 2, "poll": 0.1}
    with sites.Site(store, name, grace=flags.grace, **options) as site:
        params = site.start({"w": jnp.zeros(3)})
        while not is_over():
            time.sleep(flags.period)
            params = site.sync({"w": params["w"] + 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--grace", type=float, default=3.0)
    parser.add_argument("--period", type=float, default=0.5, help="seconds of a round")
    flags = parser.parse_args()
    threading.excepthook = lambda _: None  # of hearts that have died
    draw, over = random.Random(0), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        given = [(folder, name, flags, over.is_set) for name in "ab"]
        others = [threading.Thread(target=train, args=each) for each in given]
        for thread in others:
            thread.start()
        deaths = []
        for _ in range(flags.deaths):
            mortal = Mortal(folder)
            life = 3 * flags.period + draw.uniform(0, 2 * flags.period)
            end = time.time() + life + 1

            def live(mortal=mortal, end=end):
                try:
                    train(mortal, "c", flags, lambda: time.time() > end)
                except (Died, RuntimeError):
                    pass

            third = threading.Thread(target=live, daemon=True)
            third.start()
            time.sleep(life)
            mortal.dead.set()
            deaths.append(time.time())
            time.sleep(2 * flags.grace + 2 * flags.period)
        over.set()
        for thread in others:
            thread.join()
        commits = sorted(Path(folder).glob("commits/*.json"))
        times = [x.stat().st_mtime for x in commits]
    gaps = [*pairwise(times)]
    usual = statistics.median(end - start for start, end in gaps)
    window = 2 * flags.grace + flags.period
    found = [
        sum(
            max(0.0, end - start - usual - flags.period / 4)
            for start, end in gaps
            if end > death and start < death + window
        )
        for death in deaths
    ]
    print(
        f"{len(found)} deaths, grace {flags.grace:g} s, rounds of {usual:.1f} s: "
        f"{statistics.median(found):.1f} s in the median, {max(found):.1f} s at most"
    )


if __name__ == "__main__":
    main()
