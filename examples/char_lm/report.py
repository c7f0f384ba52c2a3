"""What a run leaves in its directory: configuration, a line a step, summary, table.

Everything is read back from the files, so that a resumed run, and one that trained
only a further method, reports on all methods alike.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from config import UserError, flag

_COLUMNS = ("method", "loss", "difference", "share", "sent", "syncs", "seconds")


def open_directory(
    out: Path, settings: dict[str, Any], names: Iterable[str], restart: bool
) -> None:
    """Make the directory of a run, or check that it holds the same run.

    Args:
        out: The directory.
        settings: All that changes a run's results; kept as `config.json`.
        names: Every method there is, for `restart`.
        restart: Remove the files of the run in it first, and no others.

    Raises:
        ValueError: it holds a run with other settings.
    """
    file = out / "config.json"
    if restart:
        for name in names:
            (out / f"{name}.jsonl").unlink(missing_ok=True)
            shutil.rmtree(out / "checkpoints" / name, ignore_errors=True)
        for old in ("summary.json", "picture.png", "config.json"):
            (out / old).unlink(missing_ok=True)
    held = read_json(file, settings)
    if held != settings:
        differences = "; ".join(
            f"{flag(key)} was {held.get(key)!r} and is now {settings.get(key)!r}"
            for key in sorted(settings.keys() | held.keys())
            if held.get(key) != settings.get(key)
        )
        raise UserError(
            f"{out} holds a run of another configuration: {differences}. Give another "
            "--out, or --restart to discard that run"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_json(file, settings)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror}): give a directory that "
            "can be made"
        ) from error


def finite(value: float | None) -> float | None:
    """None in place of a number that JSON cannot hold.

    Examples:
        >>> print(finite(0.5), finite(math.inf))
        0.5 None
    """
    return value if value is not None and math.isfinite(value) else None


def write_json(file: Path, content: Any) -> None:
    """Write all of the file or, when interrupted, nothing."""
    write_text(file, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write all of the file or, when interrupted or out of room, nothing."""
    partial = file.with_suffix(".partial")
    with naming(file):
        partial.write_text(text)
        os.replace(partial, file)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Say which file it was that the system refused to write.

    Raises:
        OSError: the same, with the file in its message.
    """
    try:
        yield
    except OSError as error:
        if str(file) in str(error):
            raise
        raise OSError(f"{file} cannot be written: {error.strerror}") from error


def read_json(file: Path, default: Any) -> Any:
    """The content of a file that `write_json` wrote, or the default without it.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return json.loads(file.read_text()) if file.exists() else default
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> UserError:
    """What to say of a damaged file of a run."""
    return UserError(
        f"{file} cannot be read ({error}): give another --out, or --restart to discard "
        "that run"
    )


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit.

    Examples:
        >>> print(human_bytes(12), human_bytes(1234567))
        12 B 1.23 MB
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {units[power]}"


def baseline(summary: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row with the lowest loss of those that synchronised on every step."""
    rows = [row for row in summary if row["syncs"] == row["steps"]]
    rows = [row for row in rows if row["validation_loss"] is not None]
    return min(rows, key=lambda row: row["validation_loss"], default=None)


def table(summary: list[dict[str, Any]]) -> str:
    """The summary as aligned text, by bytes, and what its columns are.

    Examples:
        >>> row = dict(method="synchronous", validation_loss=1.5, syncs=3, steps=3)
        >>> row |= dict(bytes=1e6, share=1.0, seconds=60.0)
        >>> local = row | dict(method="local", validation_loss=1.53, syncs=1)
        >>> local |= dict(bytes=1e4, share=0.01)
        >>> print(table([row, local]).partition("\\n\\n")[0])
        method        loss  difference  share   sent  syncs  seconds
        local        1.530       +2.0%  1.00%  10 kB      1       60
        synchronous  1.500           -   100%   1 MB      3       60
    """
    compared = baseline(summary)
    by_bytes = sorted(summary, key=lambda row: row["bytes"])
    rows = [_COLUMNS, *(_cells(row, compared) for row in by_bytes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [x.rjust(w) for x, w in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    name = compared["method"] if compared else "a method that syncs on every step"
    lines += [
        "",
        "loss        of the mean of the replicas, on held-out text; lower is better",
        f"difference  from {name}",
        "share       of what averaging float32 gradients on every step sends",
        "sent        by one replica, for training",
        "syncs       steps on which the replicas communicated",
        "seconds     of training and evaluating, without compiling the steps; replicas",
        "            share the processor, so they say nothing of a slow link",
    ]
    if sent := max((row.get("evaluation_bytes", 0) for row in summary), default=0):
        lines.append(f"The evaluations of a method sent {human_bytes(sent)} more.")
    return "\n".join(lines)


def _cells(row: dict[str, Any], compared: dict[str, Any] | None) -> tuple[str, ...]:
    share = row["share"]
    loss, other = row["validation_loss"], compared and compared["validation_loss"]
    apart = "-"
    if loss is not None and other is not None and compared is not row:
        apart = f"{100 * (loss / other - 1):+.1f}%"
    return (
        row["method"],
        "not finite" if loss is None else f"{loss:.3f}",
        apart,
        f"{100 * share:.3g}%" if share >= 0.1 else f"{100 * share:.2f}%",
        human_bytes(row["bytes"]),
        str(row["syncs"]),
        f"{row['seconds']:.0f}",
    )
