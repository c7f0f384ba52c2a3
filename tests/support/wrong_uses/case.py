"""A row of the table, how it is run, and how its message is shown."""

import contextlib
import dataclasses
import io
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong use.

    Attributes:
      name: what is wrong, as the page shows it; unique in its section.
      do: does it, in an empty folder.
      error: type of the exception; SystemExit for a command line.
      given: the piece of the message that shows what was given.
      advice: the piece that says what to do.
    """

    name: str
    do: Callable[[Path], Any]
    error: type[BaseException]
    given: str
    advice: str


def wrong(name: str, do: Callable[[], Any], error, given: str, advice: str) -> Case:
    """A case that needs no folder."""
    return Case(name, lambda folder: do(), error, given, advice)


def calls(namespace: dict[str, Any], rows: list[tuple | Case]) -> list[Case]:
    """Cases whose name is the call itself.

    Args:
      namespace: what the calls mean.
      rows: (call, error, given, advice); a case stays as it is.
    """

    def case(call, *rest):
        return wrong(call, lambda: eval(call, dict(namespace)), *rest)

    return [row if isinstance(row, Case) else case(*row) for row in rows]


def outcome(case: Case) -> tuple[type[BaseException] | None, str]:
    """The type of what is raised, and its message in one line; None if it passes."""
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(),
    ):
        # Comes before the error, and names the same.
        warnings.filterwarnings("ignore", "the training step itself communicates")
        place = Path(folder).resolve()
        try:
            case.do(place)
        except SystemExit as stop:
            text = said.getvalue() if stop.code == 2 else f"{stop.code}"
            return SystemExit, _in_one_line(text.split("error: ", 1)[-1], place)
        except Exception as error:
            return type(error), _in_one_line(str(error), place)
    return None, ""


def _in_one_line(message: str, folder: Path) -> str:
    return " ".join(message.replace(str(folder), "FOLDER").split())


# What other libraries say, and what differs from run to run.
_SHORTENED = [
    (r"0x[0-9a-f]+", "0x..."),
    (r"JitTracer\([^)]*\)", "Tracer"),
    (r"curvadion-jax [^;\s]+; this is \S+", "curvadion-jax X; this is Y"),
    (r"cannot be read \((.*?)\)([.:])", r"cannot be read (...)\2"),
    (r"JSON can hold: .*?\. Arrays", "JSON can hold: .... Arrays"),
    (r"of the parameters instead: .*", "of the parameters instead: ..."),
]


def shortened(message: str) -> str:
    """The message as the page shows it, the same on every machine."""
    for pattern, instead in _SHORTENED:
        message = re.sub(pattern, instead, message)
    return message
