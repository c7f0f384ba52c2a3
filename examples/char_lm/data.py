"""Tokens for the example: bytes of text, or token shards.

Files are only read, as bytes and as numbers (`numpy.frombuffer`, `numpy.memmap`); none
of them is unpickled or run.

Three sources give the same `Corpus`:

* nothing: the source files of the running Python's standard library, as bytes;
* text: a file or a directory of files, as bytes;
* token shards in the `.bin` format of modded-nanogpt and microsoft/dion.

Whole files are held out for validation. A batch is a function of the seed and the
step, so that a resumed run, and every method of a comparison, sees the same data.
"""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from config import UserError

BYTES = 256
# 50257 GPT-2 tokens, padded to a multiple of 128 so that the head tiles well.
GPT2_PADDED = 50_304

LIBRARY = Path(sysconfig.get_path("stdlib"))
_HELD_OUT = 0.05
# Does not occur in text, so it marks where one file ends and the next begins.
_SEPARATOR = b"\0"
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_MAGIC, _VERSION, _HEADER_BYTES = 20240520, 1, 256 * 4


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation tokens.

    Attributes:
        training: Pieces of one long sequence of tokens, uint8 or uint16.
        validation: The held-out pieces; no file is in both.
        vocabulary: Tokens are below it.
        fingerprint: Names the data; equal for equal data.
    """

    training: Sequence[np.ndarray]
    validation: Sequence[np.ndarray]
    vocabulary: int
    fingerprint: str

    def training_batch(
        self,
        seed: tuple[int, ...],
        sequences: int,
        length: int,
    ) -> np.ndarray:
        """Crops at random places, the same for the same seed.

        Args:
            seed: Seed of the run and number of the step, and what else tells
                one site's batch from another's.
            sequences: Number of crops.
            length: Tokens that the model is to see of each.

        Returns:
            int32 [sequences, length + 1]; the last token is only ever a target.

        Raises:
            ValueError: no piece is long enough, or a token is out of range.
        """
        places = np.random.default_rng(seed).random(sequences)
        return self._crops(self.training, places, length)

    def validation_batch(
        self,
        index: int,
        batches: int,
        sequences: int,
        length: int,
    ) -> np.ndarray:
        """Batch `index` of `batches`, which are spread evenly over the held-out tokens.

        The places depend on no seed: every run is measured on the same text. Shape
        and errors are those of `training_batch`.
        """
        places = (index + np.arange(sequences) * batches) / (batches * sequences)
        return self._crops(self.validation, places, length)

    def _crops(
        self, pieces: Sequence[np.ndarray], places: np.ndarray, length: int
    ) -> np.ndarray:
        starts = np.cumsum([0] + [max(piece.size - length, 0) for piece in pieces])
        if starts[-1] == 0:
            raise UserError(
                f"the longest piece of text has {max(p.size for p in pieces)} tokens; "
                f"sequences of {length} need at least {length + 1}: give more text or "
                "a smaller --sequence-length"
            )
        crops = np.empty((places.size, length + 1), np.int32)
        for row, offset in enumerate((places * starts[-1]).astype(np.int64)):
            piece = int(np.searchsorted(starts, offset, side="right")) - 1
            start = offset - starts[piece]
            crops[row] = pieces[piece][start : start + length + 1]
        if crops.max() >= self.vocabulary:
            raise UserError(
                f"token {crops.max()} is outside the vocabulary of {self.vocabulary}: "
                "give shards of GPT-2 tokens"
            )
        return crops


def load(path: str | None) -> Corpus:
    """Read the corpus at `path`, or the standard library's source where it is None.

    Args:
        path: A text file, a directory of text files, a directory of `.bin` token
            shards ('val' in the names of those to validate on), or None.

    Returns:
        The corpus; token shards are mapped into memory, not read.

    Raises:
        ValueError: nothing is there, a file is not what its name says, or nothing
            would be left to train or to validate on.
    """
    if path is None:
        return _text(library_files(), LIBRARY)
    root = Path(path)
    if not root.exists():
        raise UserError(
            f"--data {path}: there is no such file or directory; give one, or leave "
            "--data out for the source of Python's standard library"
        )
    if root.is_file():
        if root.suffix == ".bin":
            raise UserError(
                f"--data {path}: give the directory of the token shards, with the "
                "validation shard ('val' in its name) beside the training shards"
            )
        return _text([root], root.parent)
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and not _hidden(file.relative_to(root))
    )
    shards = [file for file in files if file.suffix == ".bin"]
    if shards and len(shards) < len(files):
        other = next(file for file in files if file.suffix != ".bin")
        raise UserError(
            f"--data {path} mixes token shards with other files ({other}): give a "
            "directory of one kind"
        )
    return _token_shards(shards, path) if shards else _text(files, root)


def library_files() -> list[Path]:
    """The standard library's `.py` files without tests and installed packages, sorted.

    Examples:
        >>> print([file.name for file in library_files()[:2]])
        ['__future__.py', '__hello__.py']
    """
    return sorted(
        file
        for file in LIBRARY.rglob("*.py")
        if not _NOT_LIBRARY.intersection(file.relative_to(LIBRARY).parts)
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def hash_fraction(name: str) -> float:
    """A number in [0, 1) from a name, the same on every machine.

    Examples:
        >>> round(hash_fraction("argparse.py"), 4)
        0.7861
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide names into training and validation by their hashes, about 5% of them.

    At least one is held out (the one with the smallest hash) and, of two or more, at
    least one is kept (the one with the largest). Adding a file moves no other, but
    for these two.

    Args:
        names: Relative paths, written with forward slashes.

    Returns:
        The names to train on and the names held out, each in the order given.
    """
    fractions = {name: hash_fraction(name) for name in names}
    held_out = {name for name in names if fractions[name] < _HELD_OUT}
    held_out.add(min(names, key=fractions.__getitem__))
    held_out.discard(max(names, key=fractions.__getitem__))
    return [n for n in names if n not in held_out], [n for n in names if n in held_out]


def _text(files: Sequence[Path], root: Path) -> Corpus:
    try:
        texts = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    except OSError as error:
        raise UserError(
            f"--data: {error.filename} cannot be read ({error.strerror}): make it "
            "readable, or take it out of the directory"
        ) from error
    for name, text in texts.items():
        if _SEPARATOR in text:
            raise UserError(
                f"{root / name} has NUL bytes, so it is not text: take it out (token "
                "shards are recognised by the ending .bin)"
            )
    texts = {name: text for name, text in texts.items() if text.strip()}
    if not texts:
        raise UserError(
            f"--data {root}: no text in it; give a text file, or a directory with some"
        )
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - int(_HELD_OUT * len(text))
        training, validation = text[:cut], text[cut:]
    else:
        training, validation = (
            _SEPARATOR.join(texts[name] for name in names) for names in split([*texts])
        )
    digest = hashlib.sha256(training + validation).hexdigest()[:16]
    return Corpus(
        training=[np.frombuffer(training, np.uint8)],
        validation=[np.frombuffer(validation, np.uint8)],
        vocabulary=BYTES,
        fingerprint=f"{len(training)}+{len(validation)} bytes, sha256 {digest}",
    )


def _token_shards(files: Sequence[Path], path: str) -> Corpus:
    validation = [file for file in files if "val" in file.name]
    training = [file for file in files if "val" not in file.name]
    if not training or not validation:
        raise UserError(
            f"--data {path}: {len(training)} training shards and {len(validation)} "
            "validation shards ('val' in the name): give a directory with both"
        )
    names = [f"{file.name}:{file.stat().st_size}" for file in files]
    return Corpus(
        training=[*map(read_shard, training)],
        validation=[*map(read_shard, validation)],
        vocabulary=GPT2_PADDED,
        fingerprint=hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
    )


def read_shard(file: Path) -> np.ndarray:
    """Map the tokens of a `.bin` shard into memory.

    The file is 256 little-endian int32 (20240520, version 1, number of tokens, zeros)
    and then that many uint16.

    Args:
        file: The shard.

    Returns:
        A read-only uint16 array of all its tokens.

    Raises:
        ValueError: the header is another format's, or the size is not what it says.

    References:
        https://github.com/KellerJordan/modded-nanogpt, data/fineweb.py
    """
    size = file.stat().st_size
    if size < _HEADER_BYTES:
        raise UserError(
            f"{file} has {size} bytes, and a token shard a header of {_HEADER_BYTES}: "
            "it may be cut off; copy it again, or take it out"
        )
    with file.open("rb") as stream:
        magic, version, count = np.frombuffer(stream.read(12), "<i4").tolist()
    if (magic, version) != (_MAGIC, _VERSION):
        raise UserError(
            f"{file} is no token shard: its header starts with {magic}, {version} and "
            f"not with {_MAGIC}, {_VERSION}; give shards as modded-nanogpt writes them"
        )
    if count < 1 or size != _HEADER_BYTES + 2 * count:
        raise UserError(
            f"{file} has {size} bytes, but its header promises {count} tokens, which "
            f"take {_HEADER_BYTES + 2 * count} bytes (2 each, uint16); it may be cut "
            "off: copy it again"
        )
    return np.memmap(file, "<u2", mode="r", offset=_HEADER_BYTES, shape=(count,))
