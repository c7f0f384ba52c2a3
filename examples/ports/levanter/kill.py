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
    started = {name: start(name, out, options.steps) for name in NAMES}
    try:
        killed = kill(started, options, out)
        codes = {name: process.wait() for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    folder = out / "run"
    commits = [
        (path.stat().st_mtime, {x["name"]: x["tokens"] for x in read(path)})
        for path in sorted((folder / "commits").iterdir())
    ]
    objects, wrong = audit.audit(folder)
    counted = {x: sum(y.get(x, 0) for _, y in commits) for x in NAMES}
    taken = options.steps * 8 * 128  # as in tiny.yaml
    after = lambda at, who: next((t for t, y in commits if t > at and who & {*y}), at)
    times = [t for t, _ in commits]
    return {
        "kills": len(killed),
        "exit codes": codes,
        "objects": objects,
        "wrong": wrong,
        "rounds": len(commits),
        "steps counted of those asked for": {x: y / taken for x, y in counted.items()},
        "seconds between rounds": [
            round(b - a, 1) for a, b in itertools.pairwise(times)
        ],
        "seconds from a kill to the next round": [
            round(after(at, {*NAMES}) - at, 1) for _, at in killed
        ],
        "seconds from a kill until the site counts": [
            round(after(at, {name}) - at, 1) for name, at in killed
        ],
    }


def kill(
    started: dict[str, subprocess.Popen], options: argparse.Namespace, out: Path
) -> list[tuple[str, float]]:
    """Kills and starts again, and returns who was killed and when."""
    rng, killed = random.Random(options.seed), []
    while len(killed) < options.kills:
        time.sleep(rng.expovariate(1 / options.pause))
        name = rng.choice(NAMES)
        if all(process.poll() is not None for process in started.values()):
            break
        if started[name].poll() is None:
            started[name].kill()
            started[name].wait()
            killed.append((name, time.time()))
            started[name] = start(name, out, options.steps)
    return killed


def start(name: str, out: Path, steps: int) -> subprocess.Popen:
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "main.py"), "--site", name]
    command += ["--run", str(out / "run"), "--out", str(out), "--steps", str(steps)]
    with (out / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())["contributors"]


if __name__ == "__main__":
    main()
