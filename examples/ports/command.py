"""What the ports share: flags, the last state, and what is printed."""

import argparse
import json
from pathlib import Path
from typing import Any

import curvadion_jax as cd

DOWNLOADS = Path(__file__).resolve().parent / ".upstream"


def parser(
    description: str | None, *optimizers: str, width: int | None = None
) -> argparse.ArgumentParser:
    """A parser of --optimizer, --steps, --rate, and with a default --width."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--optimizer", choices=("adamw", *optimizers), required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, help="peak learning rate")
    if width:
        parser.add_argument("--width", type=int, default=width)
    return parser


class Remembered:
    """`replicas.step` in a loop that keeps its state to itself.

    Attributes:
      state: what any step returned last.
    """

    state: Any = None
    _build = staticmethod(cd.replicas.step)

    def __init__(self, *given: Any, **named: Any):
        self._run = self._build(*given, **named)
        self.lower = self._run.lower

    def __call__(self, *inputs: Any) -> tuple[Any, Any]:
        Remembered.state, metrics = self._run(*inputs)
        return Remembered.state, metrics


def report(options: argparse.Namespace, state: Any, **found: Any) -> dict[str, Any]:
    """Prints what was found, and what was sent, as one line of JSON.

    Args:
      options: those of the command.
      state: with an optimizer that synchronises, or none.
      **found: losses and the like.
    """
    ours = options.optimizer != "adamw"
    sent = cd.metrics.read(state) if ours else {}
    result = {
        "optimizer": options.optimizer,
        **found,
        "syncs": sent.get("syncs", options.steps),
        "share": sent["bytes"] / sent["synchronous_bytes"] if ours else 1.0,
    }
    print(json.dumps(result))
    return result
