"""Download the study's text: the source of Python packages, pinned by their hashes.

    python benchmarks/study/corpus.py

Writes the `.py` files of the wheels in `packages.txt`, without tests, to `text` beside
this file. `examples/char_lm/data.py` holds out 5% of the files.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TEXT = Path(__file__).with_name("text")
PACKAGES = Path(__file__).with_name("packages.txt")


def main() -> None:
    """Run the program."""
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:", "--require-hashes", "--dest", folder]
        subprocess.run([*command, "-r", str(PACKAGES)], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    text = archive.read(name) if _is_wanted(name) else b""
                    if text.strip() and b"\0" not in text:
                        file = TEXT / f"{name}.txt"
                        file.parent.mkdir(parents=True, exist_ok=True)
                        size += file.write_bytes(text)
    print(f"{size / 1e6:.1f} MB in {TEXT}")


def _is_wanted(name: str) -> bool:
    return name.endswith(".py") and "test" not in name.lower()


if __name__ == "__main__":
    main()
