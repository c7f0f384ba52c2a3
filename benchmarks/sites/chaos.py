"""Four sites under kills, stops, and a store that fails.

    python benchmarks/sites/chaos.py --out out/chaos --minutes 5

Every site is a process that trains the model of examples/char_lm at a small size. A
step begins every `--pace` seconds at the earliest, so that the machine's few cores are
not what is measured. The supervisor restarts what dies, from a process that has
imported JAX, and kills only what has contributed since. Runs are kept in `--out`, and
the same command goes on with those that are missing. Goodput is the steps that were
counted in committed rounds over those that the sites would have taken undisturbed in
that time (a slow or absent site as many as it would have taken so).
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import audit as audit_folder

HERE = Path(__file__).resolve().parent
EVERY, SLOW, STOPPED, CUT = 20, 3.0, 60.0, 30.0
RUNS = {
    "undisturbed": frozenset(),
    "a kill a minute": frozenset({"kills"}),
    "a kill every 6 s": frozenset({"many kills"}),
    "all faults": frozenset({"kills", "stop", "slow", "come and go", "store"}),
}


# Its processes are copies of one that has imported everything.
FORKS = multiprocessing.get_context("forkserver")


def child(name: str, folder: Path, pace: float) -> None:
    import chaos_site

    with (folder / f"{name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    chaos_site.site(name, folder, pace)


def environment(out: Path) -> dict[str, str]:
    """Of the sites: one CPU device, and compiled programs that stay."""
    paths = [HERE, HERE.parents[1], HERE.parents[1] / "examples" / "char_lm"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class Supervisor:
    """Starts processes, strikes them, and starts them again.

    Attributes:
        restarts: how often one was started again after a kill.
        ended: those that ended by themselves before they were told to.
    """

    def __init__(self, folder: Path, pace: float):
        self.folder, self._pace = folder, pace
        self.processes: dict[str, Any] = {}
        self.born: dict[str, float] = {}
        self.gone: dict[str, float] = {}
        self.paces: dict[str, float] = {}
        self.restarts, self.ended = 0, []

    def start(self, name: str, pace: float = 1.0) -> None:
        self.paces.setdefault(name, pace * self._pace)
        self.born.setdefault(name, time.monotonic())
        self.ready(name).unlink(missing_ok=True)
        given = name, self.folder, self.paces[name]
        self.processes[name] = FORKS.Process(target=child, args=given)
        self.processes[name].start()

    def ready(self, name: str) -> Path:
        """Is there once a process has contributed."""
        return self.folder / f"{name}.ready"

    def look(self) -> None:
        """Starts again what has died."""
        for name, process in list(self.processes.items()):
            status = process.exitcode
            if status is None or name in self.gone:
                continue
            if status != -signal.SIGKILL:
                self.ended.append((name, status))
            self.restarts += 1
            self.start(name)

    def leave(self, name: str) -> None:
        self.gone[name] = time.monotonic()
        self.processes[name].terminate()

    def end(self) -> None:
        for name in self.processes:
            if name not in self.gone:
                self.leave(name)
        for name, process in self.processes.items():
            process.join(300)
            if process.exitcode != 0:
                self.ended.append((name, process.exitcode))
                process.kill()


def schedule(faults: frozenset[str], seconds: float, names: list[str], seed: int):
    """When what happens: (second, what, to whom)."""
    draw, events = random.Random(seed), []
    if "kills" in faults:
        times = range(45, int(seconds) - 20, 60)
        events += [(at, "kill", draw.choice(names)) for at in times]
    if "many kills" in faults:
        times = range(5, int(seconds), 6)
        events += [(at, "kill", names[at // 6 % len(names)]) for at in times]
    if "stop" in faults:
        events += [(0.2 * seconds, "stop", names[0])]
        events += [(0.2 * seconds + STOPPED, "continue", names[0])]
    if "come and go" in faults:
        events += [(0.25 * seconds, "come", "late"), (0.6 * seconds, "leave", names[3])]
    if "store" in faults:
        events += [(0.5 * seconds, "cut", ""), (0.5 * seconds + CUT, "mend", "")]
        events += [(0.8 * seconds, "full", ""), (0.8 * seconds + CUT, "empty", "")]
    return sorted(events)


def strike(sites: Supervisor, what: str, name: str) -> bool:
    """Does it; not yet if it is to kill a site that has not contributed."""
    process = sites.processes.get(name)
    if what == "kill" and name not in sites.gone and not sites.ready(name).exists():
        return False
    if what in ("cut", "full"):
        (sites.folder / what).touch()
    elif what in ("mend", "empty"):
        (sites.folder / {"mend": "cut", "empty": "full"}[what]).unlink()
    elif what == "come":
        sites.start(name)
    elif process is not None and name not in sites.gone:
        if what == "leave":
            sites.leave(name)
        else:
            kinds = {"kill": "SIGKILL", "stop": "SIGSTOP", "continue": "SIGCONT"}
            os.kill(process.pid, getattr(signal, kinds[what]))
    return True


def run(name: str, out: Path, seconds: float, pace: float) -> dict[str, Any]:
    """One run, from the start of its processes to its row of the table."""
    faults, folder = RUNS[name], out / name.replace(" ", "-").replace(",", "")
    folder.mkdir(parents=True, exist_ok=False)
    (folder / "faults.json").write_text(json.dumps(sorted(faults)))
    sites = Supervisor(folder, pace)
    names = [f"site{index}" for index in range(4)]
    for index, each in enumerate(names):
        sites.start(each, SLOW if "slow" in faults and index == 2 else 1.0)
        if index == 0:  # what it has compiled the others find
            ready(sites, names[:1])
    ready(sites, names)
    events, start = schedule(faults, seconds, names, seed=0), time.monotonic()
    sites.born = dict.fromkeys(sites.born, start)
    before = taken(folder)
    kills, now = 0, 0.0
    while now < seconds or (events and now < 5 * seconds):
        now = time.monotonic() - start
        while events and events[0][0] <= now and strike(sites, *events[0][1:]):
            kills += events.pop(0)[1] == "kill"
        sites.look()
        time.sleep(0.2)
    steps = taken(folder) - before
    length = time.monotonic() - start
    sites.end()
    wanted = sum(
        (min(sites.gone[x], start + length) - born) / sites.paces[x]
        for x, born in sites.born.items()
    )
    row = {
        "run": name,
        "minutes": round(length / 60, 1),
        "kills": kills,
        "goodput": steps / wanted,
        "steps": steps,
        "restarts": sites.restarts,
        "ended by themselves": len(sites.ended),
    }
    return row | audit(folder, out)


def ready(sites: Supervisor, names: list[str]) -> None:
    """Until all have compiled, and contributed."""
    while not all(sites.ready(name).exists() for name in names):
        sites.look()
        if len(sites.ended) > 8:
            raise RuntimeError(f"the sites do not start: see {sites.folder}/*.log")
        time.sleep(0.2)


def taken(folder: Path) -> float:
    """Steps that are counted in commits."""
    return sum(e["tokens"] for c in commits(folder) for e in c["contributors"])


def commits(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "run" / "commits").glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


def audit(folder: Path, out: Path) -> dict[str, Any]:
    """What must hold of a run, and the loss of its model."""
    command = [sys.executable, __file__, "--child", "judge", "judge", str(folder), "0"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    row = {"loss": float(found.stdout.split()[-1])}
    all_, ends = (
        commits(folder),
        [json.loads(p.read_text()) for p in folder.glob("*.end")],
    )
    objects, wrong = audit_folder.audit(folder / "run")
    by_round: dict[int, set[str]] = {}
    for end in ends:
        by_round.setdefault(end["round"], set()).add(end["digest"])
    return row | {
        "rounds": len(all_),
        "objects": objects,
        "faults": wrong,
        "equal to the bit": all(len(x) == 1 for x in by_round.values()),
        "rejected": sum(len(c["rejected"]) for c in all_),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = "run|minutes|kills|goodput|loss|rounds|restarts|objects|faults"
    lines = [f"| {head.replace('|', ' | ')} |", "|---" * 9 + "|"]
    for row in rows:
        cells = [
            *(row["run"], row["minutes"], row["kills"], f"{row['goodput']:.1%}"),
            *(f"{row['loss']:.4f}", row["rounds"], row["restarts"]),
            *(row["objects"], len(row["faults"])),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--pace", type=float, default=0.4, help="seconds a step")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        import chaos_site

        kind, name, folder, pace = flags.child
        getattr(chaos_site, kind)(name, Path(folder), float(pace))
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(flags.out)
    FORKS.set_forkserver_preload(["chaos_site"])
    file = flags.out / "rows.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in flags.runs:
        if name not in [row["run"] for row in rows]:
            rows.append(run(name, flags.out, 60 * flags.minutes, flags.pace))
            file.write_text(json.dumps(rows, indent=2))
    print(table(rows))


if __name__ == "__main__":
    main()
