"""Saves into a folder that takes no more, and then takes something again.

python tests/support/refused_main.py FOLDER mounts
python tests/support/refused_main.py FOLDER permissions

With `mounts` FOLDER is a small disk of its own, which is full and then read-only; the
process needs a mount namespace, `unshare --map-root-user --mount`. With `permissions`
it loses its right to write. Prints a line of JSON for each refusal.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__" and sys.argv[2] == "permissions" and os.geteuid() == 0:
    # Root is stopped by permissions once it has given up to override them, which
    # counts from the next program on.
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], "no-root"])

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import saving_main

import curvadion_jax as cd

SIZE = "24m"  # of the disk: three checkpoints of 6 MB, of which two are kept


@contextlib.contextmanager
def filled(folder: Path, room: int) -> Iterator[None]:
    """A disk with so many bytes left."""
    disk, filler = os.statvfs(folder), folder / "filler"
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize - room))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A disk that is read-only."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextlib.contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """A folder that may be read alone."""
    folder.chmod(0o555)
    yield
    folder.chmod(0o755)


def same(found: dict[str, jax.Array], step: int) -> bool:
    """Whether these are the contents of a step, to the bit."""
    expected = jax.device_get(saving_main.contents(step))
    found = jax.device_get(found)
    return all(found[n].tobytes() == expected[n].tobytes() for n in expected)


def refusal(folder: Path, step: int, refused: contextlib.AbstractContextManager):
    """What a refused save raises, what is left, and whether the next one works."""
    report = {}
    with refused:
        try:
            cd.checkpoint.save(folder, step, saving_main.contents(step), keep=2)
        except OSError as error:
            report |= {"errno": error.errno, "message": str(error)}
            report["cause"] = repr(error.__cause__)
        latest = report["latest"] = cd.checkpoint.latest_step(folder)
        restored = cd.checkpoint.restore(folder, saving_main.contents(0))
        report["same"] = same(restored, latest)
    cd.checkpoint.save(folder, step, saving_main.contents(step), keep=2)
    report["steps"] = sorted(path.name for path in folder.iterdir())
    print(json.dumps(report), flush=True)


def main(folder: Path, way: str) -> None:
    """Steps 0 and 1 are saved, and each that is refused is saved in the end."""
    jax.config.update("jax_num_cpu_devices", saving_main.REPLICAS)
    if way == "mounts":
        disk = ["-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs"]
        subprocess.run(["mount", *disk, folder], check=True)
    for step in (0, 1):
        cd.checkpoint.save(folder, step, saving_main.contents(step), keep=2)
    if way == "mounts":
        # None left for the temporary folder's first file; some, for a part of the data.
        refusal(folder, 2, filled(folder, 0))
        refusal(folder, 3, filled(folder, 1_000_000))
        refusal(folder, 4, read_only(folder))
    else:
        refusal(folder, 2, forbidden(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
