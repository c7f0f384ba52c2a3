"""Checks every object of a run in a folder, without the library that wrote it.

python benchmarks/sites/audit.py FOLDER
"""

import hashlib
import json
import math
import sys
from pathlib import Path

FORMAT = 3


def audit(folder: Path) -> tuple[int, list[str]]:
    """The number of objects, and all that is wrong with them."""
    # Names with "#" are uploads that a kill has cut off; obstore does not list them.
    files = [x for x in folder.rglob("*") if x.is_file() and "#" not in x.name]
    objects = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    wrong: list[str] = []
    headers = {key: json.loads(x) for key, x in objects.items() if _has_header(key)}
    run = headers["run.json"]["sha256"]
    for key, header in headers.items():
        own = {name: x for name, x in header.items() if name != "sha256"}
        place = [FORMAT, "" if key == "run.json" else run, key, own]
        if _sha256(json.dumps(place).encode()) != header["sha256"]:
            wrong.append(f"{key} does not match its digest, or belongs elsewhere")
        if key.startswith(("rounds/", "snapshots/")):
            body = objects.get(f"bodies/{key}/{header['sha256']}")
            if body is None or _sha256(body) != header["body"]:
                wrong.append(f"{key} has not the body of its digest")
    commits = sorted(key for key in headers if key.startswith("commits/"))
    uids: list[str] = []
    for number, key in enumerate(commits):
        if key != f"commits/{number:08d}.json":
            wrong.append(f"{key} is not commit {number}")
        commit = headers[key]
        rates = [rate for _, rate in commit["roster"].values()]
        for entry in commit["contributors"]:
            uids.append(entry["uid"])
            rate = commit["roster"][entry["name"]][1]
            if not math.isclose(entry["weight"], rate * len(rates) / math.fsum(rates)):
                wrong.append(f"{key} has another weight for {entry['name']}")
            sent = headers.get(f"rounds/{number:08d}/{entry['name']}")
            if sent is not None and (sent["sha256"], sent["before"]) != (
                entry["sha256"],
                commit["before"],
            ):
                wrong.append(f"{key} counts another contribution of {entry['name']}")
    wrong += [f"{uid} counts twice" for uid in set(uids) if uids.count(uid) > 1]
    for key, header in headers.items():
        following = headers.get(f"commits/{key[-8:]}.json")
        if key.startswith("snapshots/") and following is not None:
            body = objects[f"bodies/{key}/{header['sha256']}"]
            if _sha256(body)[:32] != following["before"]:
                wrong.append(f"{key} is not what the commit after it confirms")
    return len(objects), wrong


def _has_header(key: str) -> bool:
    return not key.startswith(("bodies/", "members/"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    count, faults = audit(Path(sys.argv[1]))
    print("\n".join([*faults, f"{count} objects, {len(faults)} faults"]))
    sys.exit(bool(faults))
