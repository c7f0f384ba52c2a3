"""Two sites of PyTorch and one of JAX in one run; the first two are killed at random.

    python examples/sites_torch/together.py --kills 4

Each site is a process, and the run a folder. A killed site is started again at once, by
the same command. At the end the folder is audited. Every contribution was measured from
the outer parameters that all sites had, to the bit, and none counts twice. Every step
of the site that is never killed has counted. Each kill has cost its own site two
periods of steps at most: a contribution that was under way, and the steps since.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks" / "sites"))
import audit  # noqa: E402

PROGRAMS = {"rome": "main.py", "bern": "main.py", "oslo": "jax_site.py"}
KILLED = ["rome", "bern"]
TOKENS, EVERY = 16 * 64, 7  # of a step, and steps between contributions


class Site:
    """The process of a site."""

    def __init__(self, name: str, flags: argparse.Namespace) -> None:
        given = ["--site", name, "--run", str(flags.out / "run")]
        given += ["--out", str(flags.out), "--steps", str(flags.steps)]
        program = str(HERE / PROGRAMS[name])
        self._command = [sys.executable, program, *given, "--pace", str(flags.pace)]
        self.log = flags.out / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)


def commits(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "run" / "commits").glob("*.json"))
    return [json.loads(x.read_text()) | {"time": x.stat().st_mtime} for x in files]


def has_counted(out: Path, name: str, since: int) -> bool:
    """Whether a site has contributed to a round from this one on."""
    found = commits(out)[since:]
    return any(x["name"] == name for each in found for x in each["contributors"])


def kill_at_random(sites: dict[str, Site], flags: argparse.Namespace) -> list[float]:
    """Kills one or the other, once both have counted since. Returns the times."""
    draw, times, since = random.Random(flags.seed), [], 0
    while len(times) < flags.kills:
        time.sleep(draw.uniform(0, 2 * flags.pause))
        if any(site.process.poll() is not None for site in sites.values()):
            print("A site has ended before all kills. Give more --steps.")
            break
        if all(has_counted(flags.out, name, since) for name in PROGRAMS):
            name = draw.choice(KILLED)
            sites[name].process.kill()
            sites[name].process.wait()
            times.append(time.time())
            since = len(commits(flags.out))
            sites[name].start()
    return times


def faults(out: Path, steps: int, kills: int) -> list[str]:
    """What is wrong with a run that has ended."""
    _, wrong = audit.audit(out / "run")
    counted: Counter[str] = Counter()
    for commit in commits(out):
        wrong += [f"{x['name']} was rejected: {x['why']}" for x in commit["rejected"]]
        for entry in commit["contributors"]:
            counted[entry["name"]] += entry["tokens"]
    for name in PROGRAMS:
        lost = kills * 2 * EVERY if name in KILLED else 0
        wanted = range((steps - lost) * TOKENS, (steps + lost) * TOKENS + 1)
        if counted[name] not in wanted:
            wrong.append(f"of {name} {counted[name] / TOKENS:g} steps counted")
    return wrong


def delays(out: Path, kills: list[float]) -> list[float]:
    """By how much longer than usual the rounds took that a kill fell into."""
    times = [commit["time"] for commit in commits(out)]
    gaps = list(itertools.pairwise(times))
    usual = statistics.median(end - start for start, end in gaps)
    hit = [
        end - start - usual for start, end in gaps for x in kills if start < x <= end
    ]
    return [max(0.0, x) for x in hit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument(
        "--pace", type=float, default=0.3, help="seconds a step, at least"
    )
    parser.add_argument(
        "--pause", type=float, default=4.0, help="seconds between kills"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/torch"))
    flags = parser.parse_args()
    flags.out.mkdir(parents=True)
    sites = {name: Site(name, flags) for name in PROGRAMS}
    try:
        kills = kill_at_random(sites, flags)
        codes = {name: site.process.wait() for name, site in sites.items()}
    finally:
        for site in sites.values():
            site.process.kill()
    for site in sites.values():
        print("".join(site.log.read_text().splitlines(keepends=True)[-3:]), end="")
    wrong = [f"{name} ended with {code}" for name, code in codes.items() if code]
    wrong += faults(flags.out, flags.steps, len(kills))
    if found := delays(flags.out, kills):
        print(
            f"{len(kills)} kills delayed the others by {statistics.median(found):.1f} "
            f"s in the median, {max(found):.1f} s at most"
        )
    print(f"{len(commits(flags.out))} rounds, {len(wrong)} faults")
    print("\n".join(wrong), end="")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
