"""Kills sites of a Levanter run at random instants, and audits what is left.

python examples/ports/levanter/kill.py --kills 10
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "benchmarks" / "sites"))

import audit  # noqa: E402

NAMES = ("bern", "oslo", "paris", "rome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=140, help="of each site")
    parser.add_argument("--pause", type=float, default=60, help="mean seconds")
    parser.add_argument("--out", type=Path, help="kept; a temporary folder otherwise")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = run(options, options.out or Path(temporary))
    print(json.dumps(found))


def run(options: argparse.Namespace, out: Path) -> dict:
    folder, rng = out / "run", random.Random(options.seed)
    started = {name: start(name, out, options.steps) for name in NAMES}
    killed: list[tuple[str, float]] = []
    while len(killed) < options.kills and not all(ended(started.values())):
        time.sleep(rng.expovariate(1 / options.pause))
        name = rng.choice(NAMES)
        if started[name].poll() is None:
            started[name].kill()
            started[name].wait()
            killed.append((name, time.time()))
            started[name] = start(name, out, options.steps)
    codes = {name: process.wait() for name, process in started.items()}
    commits = [
        (path.stat().st_mtime, {x["name"]: x for x in read(path)["contributors"]})
        for path in sorted((folder / "commits").iterdir())
    ]
    objects, wrong = audit.audit(folder)
    tokens = {x: sum(y[x]["tokens"] for _, y in commits if x in y) for x in NAMES}
    back, gaps = [], []
    for name, at in killed:
        back += [min((t for t, y in commits if name in y and t > at), default=at) - at]
        before = max((t for t, _ in commits if t <= at), default=at)
        gaps += [min((t for t, _ in commits if t > at), default=before) - before]
    times = [t for t, _ in commits]
    usual = sorted(b - a for a, b in itertools.pairwise(times))
    return {
        "kills": len(killed),
        "exit codes": codes,
        "objects": objects,
        "wrong": wrong,
        "rounds": len(commits),
        "tokens counted / taken": {
            x: y / tokens_of(options) for x, y in tokens.items()
        },
        "median seconds between rounds": round(usual[len(usual) // 2], 1),
        "seconds between the rounds around a kill": [round(x, 1) for x in gaps],
        "seconds until a killed site counts again": [round(x, 1) for x in back],
    }


def tokens_of(options: argparse.Namespace) -> int:
    return options.steps * 8 * 128  # as in tiny.yaml


def start(name: str, out: Path, steps: int) -> subprocess.Popen:
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "main.py"), "--site", name]
    command += ["--run", str(out / "run"), "--out", str(out), "--steps", str(steps)]
    with (out / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def ended(processes) -> list[bool]:
    return [process.poll() is not None for process in processes]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
