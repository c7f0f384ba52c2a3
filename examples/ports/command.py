"""What the ports share: flags, and what is printed."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def report(
    options: argparse.Namespace, sent: Mapping[str, Any], **found: Any
) -> dict[str, Any]:
    """Prints what was found, and what was sent, as one line of JSON.

    Args:
      options: those of the command.
      sent: what `cd.metrics.read` returned last; of AdamW, which sends gradients on
        every step, empty.
      **found: losses and the like.
    """
    result = {
        "optimizer": options.optimizer,
        **found,
        "syncs": int(sent.get("syncs", options.steps)),
        "share": sent.get("share", 1.0),
    }
    print(json.dumps(result))
    return result
