"""The text of a size, and which part of it a loss is of.

Of the standard library's held-out bytes 62% are English prose, `pydoc_data/topics.py`,
and 11% tables of `encodings`, nearly the same as others that are trained on. What
remains is source code.
"""

import dataclasses
from pathlib import Path

import data
import numpy as np

_APART = ("pydoc_data/", "encodings/")


def others(corpus: data.Corpus, path: str | None) -> dict[str, data.Corpus]:
    """The same corpus with something else to validate on, by name.

    Args:
        corpus: That of a run.
        path: What it was loaded from; None is the standard library.

    Returns:
        'training' is the text that it is trained on, and of the standard library
        'source' the held-out files that are neither prose nor tables.
    """
    found = {"training": dataclasses.replace(corpus, validation=corpus.training)}
    if path is None:
        text = b"\0".join(file.read_bytes() for file in source_files())
        found["source"] = dataclasses.replace(
            corpus, validation=[np.frombuffer(text, np.uint8)]
        )
    return found


def source_files() -> list[Path]:
    """The held-out files of the standard library that are source code like the rest.

    Examples:
        >>> {file.parent.name for file in source_files()} & {"pydoc_data", "encodings"}
        set()
    """
    files = data.library_files()
    names = [file.relative_to(data.LIBRARY).as_posix() for file in files]
    held_out = data.split(names)[1]
    return [data.LIBRARY / name for name in held_out if not name.startswith(_APART)]
