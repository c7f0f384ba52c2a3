"""Tokens for the ports: modules of Python's standard library, as bytes.

No port needs the network: every machine with Python has this text.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SPECIAL = 3  # padding, begin and end, as most tokenizers number them
VOCABULARY = 256 + SPECIAL
_TRAINING = (
    "argparse ast asyncio/base_events asyncio/streams calendar cmd codecs "
    "collections/__init__ configparser copy csv datetime dataclasses decimal "
    "difflib dis doctest "
    "enum fractions ftplib functools gettext glob heapq http/client http/server "
    "imaplib inspect ipaddress json/decoder json/encoder locale logging/__init__ "
    "mailbox mimetypes netrc ntpath os pathlib pdb pickle pickletools platform "
    "plistlib poplib posixpath pprint pydoc queue random shelve shlex shutil smtplib "
    "socket socketserver sqlite3/dump ssl statistics string subprocess tarfile "
    "tempfile textwrap threading timeit tokenize trace traceback turtle types typing "
    "unittest/case unittest/mock urllib/parse urllib/request uuid warnings wave "
    "weakref zipfile"
)
_HELD_OUT = "bdb optparse selectors zipapp urllib/robotparser"


def text(held_out: bool = False) -> bytes:
    """All modules in a row."""
    library = Path(sysconfig.get_path("stdlib"))
    names = _HELD_OUT if held_out else _TRAINING
    found = [library / f"{name}.py" for name in names.split()]
    return b"".join(path.read_bytes() for path in found if path.exists())


def tokens(held_out: bool = False) -> np.ndarray:
    """The text as int32, from `SPECIAL` on."""
    return np.frombuffer(text(held_out), np.uint8).astype(np.int32) + SPECIAL


def batches(
    rows: int, length: int, *, held_out: bool = False, seed: int = 0
) -> Iterator[np.ndarray]:
    """Crops [rows, length] at random places, without end."""
    source, rng = tokens(held_out), np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(source) - length, rows)
        yield np.stack([source[start : start + length] for start in starts])
