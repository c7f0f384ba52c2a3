"""The codebases at the versions that the patches are for, out of their own releases."""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NANODO = "https://github.com/google-deepmind/nanodo"
NANODO_COMMIT = "10aefdeed40a63293daf112b91a5538cd24fa3a4"
FLAX = "flax==0.12.8"
MAXTEXT = "maxtext==0.2.5"
LEVANTER = "marin-levanter==0.2.227.dev40316220070"


class NotReachedError(RuntimeError):
    """No network, or no such release."""


def flax_example(name: str, folder: Path, *, patched: bool) -> Path:
    """`examples/NAME` of the source release of Flax, unpacked into a folder of its own.

    Raises:
      NotReachedError: if the release cannot be downloaded.
    """
    releases = folder / "releases"
    if not list(releases.glob("flax-*.tar.gz")):
        command = "download --quiet --no-deps --no-binary :all: --dest".split()
        _run([sys.executable, "-m", "pip", *command, str(releases), FLAX])
    (release,) = releases.glob("flax-*.tar.gz")
    target = folder / f"{name}-{_state(name, patched)}"
    inside = f"{release.name.removesuffix('.tar.gz')}/examples/{name}"
    if not target.exists():
        with tarfile.open(release) as archive:
            found = [x for x in archive if x.name.startswith(inside + "/")]
            # Python has it since 3.11.4.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(target, found)
        if patched:
            _patch(target / inside, f"{name}/{name}")
    return target / inside


def nanodo(folder: Path, *, patched: bool) -> Path:
    """A clone of NanoDO at the commit that the patch is for.

    Raises:
      NotReachedError: if it cannot be cloned.
    """
    target = folder / f"nanodo-{_state('nanodo', patched)}"
    if not target.exists():
        _run(["git", "clone", "--quiet", NANODO, str(target)])
        _run(["git", "-C", str(target), "checkout", "--quiet", NANODO_COMMIT])
        _patch(target, "nanodo/new_jax")
        if patched:
            _patch(target, "nanodo/nanodo")
    return target


def maxtext(folder: Path, *, patched: bool) -> Path:
    """The wheel of MaxText, unpacked; its requirements are not installed.

    Raises:
      NotReachedError: if the release cannot be downloaded.
    """
    return _wheel("maxtext", MAXTEXT, folder, patched=patched)


def levanter(folder: Path, *, patched: bool) -> Path:
    """The wheel of Levanter, unpacked; its requirements are not installed.

    Raises:
      NotReachedError: if the release cannot be downloaded.
    """
    return _wheel("levanter", LEVANTER, folder, patched=patched)


def _wheel(name: str, what: str, folder: Path, *, patched: bool) -> Path:
    target = folder / f"{name}-{_state(name, patched)}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed once it is whole: several sites may start at once, or be killed here.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        options = "--quiet --no-deps --only-binary=:all: --python-version 3.12 --dest"
        command = ["download", *options.split(), temporary, what]
        _run([sys.executable, "-m", "pip", *command])
        (release,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / name
        with zipfile.ZipFile(release) as archive:
            archive.extractall(unpacked)
        if patched:
            _patch(unpacked, f"{name}/{name}")
        try:
            unpacked.rename(target)
        except OSError:
            if not target.exists():  # another process was sooner
                raise
    return target


def _state(name: str, patched: bool) -> str:
    """What tells sources apart by the patch that they have; another one is another."""
    if not patched:
        return "unpatched"
    patch = HERE / name / f"{name}.patch"
    return f"patched-{hashlib.sha256(patch.read_bytes()).hexdigest()[:8]}"


def _patch(folder: Path, name: str) -> None:
    patch = HERE / f"{name}.patch"
    # Inside a clone of this repository git would skip what it ignores, in silence.
    command = ["git", "apply", "--unidiff-zero", "-p1", str(patch.resolve())]
    _run(command, cwd=folder, GIT_CEILING_DIRECTORIES=str(folder.resolve().parent))


def _run(command: list[str], cwd: Path | None = None, **environment: str) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        what = " ".join(command)
        raise NotReachedError(f"{what} failed: {done.stderr.strip()[-500:]}")
