"""Download the study's text: the source of Python packages, pinned by their hashes.

    python benchmarks/study/corpus.py             # 75 MB, the study's
    python benchmarks/study/corpus.py --large     # 312 MB, that of benchmarks/gpu

Writes the `.py` files of the wheels in `packages.txt`, without tests, to `text` beside
this file. `examples/char_lm/data.py` holds out 5% of the files. The study's results are
of this text, so it stays.

`--large` adds the packages of `more_packages.txt`. Its training and its held-out text
are one file each, in the folder `text-large` and in `text-large.tar.xz`, which can be
carried to a machine without a network: there `large` unpacks it. Of equal files it has
one, so a run reads none twice.
"""

import argparse
import hashlib
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEXT, LARGE = HERE / "text", HERE / "text-large"
ARCHIVE = HERE / "text-large.tar.xz"
PACKAGES = HERE / "packages.txt"
MORE = HERE / "more_packages.txt"
_PARTS = ("training", "validation", "fingerprint")


def download(lists: Iterable[Path], folder: Path, distinct: bool = False) -> int:
    """Writes the source of the packages in these lists, and returns its bytes.

    `distinct` leaves out files that are equal to one before.
    """
    size, known = 0, set()
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:", "--require-hashes", "--dest", wheels]
        command += ["--ignore-requires-python"]  # They are read, and never run.
        for packages in lists:
            subprocess.run([*command, "-r", str(packages)], check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    text = archive.read(name) if _is_wanted(name) else b""
                    key = hashlib.sha256(text).digest() if distinct else name
                    if text.strip() and b"\0" not in text and key not in known:
                        known.add(key)
                        file = folder / f"{name}.txt"
                        file.parent.mkdir(parents=True, exist_ok=True)
                        size += file.write_bytes(text)
    return size


def _is_wanted(name: str) -> bool:
    return name.endswith(".py") and "test" not in name.lower()


def write_large(files: Path, folder: Path = LARGE, archive: Path = ARCHIVE) -> None:
    """Makes two files of a folder of text, and packs them."""
    import data

    found = data.load(str(files))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training").write_bytes(found.training[0].tobytes())
    (folder / "validation").write_bytes(found.validation[0].tobytes())
    (folder / "fingerprint").write_text(found.fingerprint)
    # A dictionary of a quarter of a gigabyte: packages repeat each other.
    form = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**28}
    part_of_it = archive.with_suffix(".part")
    with lzma.open(part_of_it, "wb", filters=[form]) as stream:
        with tarfile.open(fileobj=stream, mode="w") as packed:
            for part in _PARTS:
                packed.add(folder / part, part)
    part_of_it.replace(archive)


def unpack(archive: Path, folder: Path | str) -> None:
    with tarfile.open(archive) as packed:
        # Python has it since 3.11.4.
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)


def large(folder: Path = LARGE, archive: Path = ARCHIVE) -> Any:
    """The large text, a `data.Corpus` in mapped memory; unpacks it if need be."""
    import data
    import numpy as np

    if not (folder / "fingerprint").exists():
        if not archive.exists():
            raise SystemExit(
                f"There is no {archive.name}: python benchmarks/study/corpus.py --large"
            )
        with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
            unpack(archive, unpacked)
            folder.mkdir(exist_ok=True)
            for part in _PARTS:  # the last one says that all are there
                Path(unpacked, part).replace(folder / part)
    training, validation = (
        np.memmap(folder / part, np.uint8, mode="r") for part in _PARTS[:2]
    )
    fingerprint = (folder / "fingerprint").read_text()
    return data.Corpus([training], [validation], data.BYTES, fingerprint)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true")
    if not parser.parse_args().large:
        print(f"{download([PACKAGES], TEXT) / 1e6:.1f} MB in {TEXT}")
        return
    sys.path.insert(0, str(HERE.parents[1] / "examples" / "char_lm"))
    with tempfile.TemporaryDirectory() as files:
        size = download([PACKAGES, MORE], Path(files), distinct=True)
        write_large(Path(files))
    packed = ARCHIVE.stat().st_size / 2**20
    print(f"{size / 1e6:.1f} MB in {LARGE}, {packed:.1f} MiB in {ARCHIVE}")


if __name__ == "__main__":
    main()
