"""Train a small GPT with 8 replicas: local Muon, synchronous AdamW and Muon, CurvaDion.

    python examples/char_lm/main.py
    python examples/char_lm/main.py --short

This file reads the flags; `train.py` does everything else.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before anything imports NumPy: OpenBLAS's own threads would compete with the replicas
# for the cores, which makes small factorisations many times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import journal
import methods
import one_site
import processes
import train
from config import PRESETS, SHORT, Config, UserError, flag

# What shells give after Ctrl-C, and EX_IOERR of BSD's sysexits.
_BY_USER, _NOT_WRITTEN = 130, 74

_PROCESSES = ("coordinator", "num_processes", "process_id", "distributed")
_NOT_OF_A_SITE = (
    *("method", "restart", "replicas", "rank", "budget", "threshold"),
    *_PROCESSES,
)


def _rank(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="main.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size")
    parser.add_argument(
        "--method",
        default="local_muon,synchronous_adamw,synchronous_muon,curvadion",
        metavar="NAME[,NAME...]",
        help=f"what to train, in this order: {', '.join(methods.METHODS)} (default: "
        "%(default)s)",
    )
    shorter = ", ".join(f"{flag(name)} {value}" for name, value in SHORT.items())
    parser.add_argument(
        "--short",
        action="store_true",
        help=f"a first look, five minutes: {shorter}",
    )
    types = {"rank": _rank, "data": str, "dtype": str}
    types |= dict.fromkeys(("learning_rate", "budget", "threshold"), float)
    for field in dataclasses.fields(Config):
        name, text = field.name, field.metadata["help"]
        default = getattr(PRESETS["tiny"], name)
        known = all(getattr(p, name) == default for p in PRESETS.values())
        if known and default is not None:
            text += f" (default: {default})"
        parser.add_argument(
            flag(name),
            type=types.get(name, int),
            default=argparse.SUPPRESS,
            choices=("float32", "bfloat16") if name == "dtype" else None,
            help=text,
        )
    parser.add_argument(
        "--out",
        type=Path,
        help="default: out/char_lm, with --short out/char_lm_short",
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard what --out holds"
    )
    parser.add_argument(
        "--stopped-status",
        type=int,
        default=0,
        metavar="STATUS",
        help="exit status after SIGTERM, once all is saved: one other than 0 tells a"
        " scheduler that the run is not at its end (default: %(default)s)",
    )
    _add_processes(parser)
    _add_site(parser)
    return parser


def _add_site(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "one of several sites",
        "independent programs with one model; a step's batch is the site's own",
    )
    group.add_argument("--site", metavar="NAME", help="the name of this one")
    group.add_argument(
        "--run", metavar="URL", help="where they meet: a folder, s3://bucket/run, ..."
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several processes", "replicas, batch and the rest stay those of all together"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens"
    )
    group.add_argument("--num-processes", type=int, help="number of processes")
    group.add_argument("--process-id", type=int, help="which one this is, from 0")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="find these in the environment: SLURM, Open MPI, Kubernetes, Cloud TPU",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=100,
        metavar="SECONDS",
        help="how long a process may be silent before all others end",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: Command line; None is that of the process.

    Returns:
        Exit status: 0, 74 if a file cannot be written, 130 after Ctrl-C, and
        `--stopped-status` after SIGTERM.
    """
    parser = _parser()
    flags = vars(parser.parse_args(arguments))
    unread = [name for name in _NOT_OF_A_SITE if _is_given(parser, flags, name)]
    preset, names = flags.pop("preset"), flags.pop("method").split(",")
    short, restart = flags.pop("short"), flags.pop("restart")
    out = flags.pop("out") or Path("out/char_lm_short" if short else "out/char_lm")
    stopped = flags.pop("stopped_status")
    heartbeat = flags.pop("heartbeat_timeout")
    place = [flags.pop(name) for name in _PROCESSES]
    site, url = flags.pop("site"), flags.pop("run")
    try:
        changed = (SHORT if short else {}) | flags
        config = dataclasses.replace(PRESETS[preset], **changed)
        if site or url:
            if unread:
                raise UserError(
                    f"a site does not read {', '.join(map(flag, unread))}: it is one "
                    "program with local_muon's steps, and begins anew with another "
                    "--run and --out"
                )
            return _run_site(config, site, url, out, flags)
        methods.check(names, flags)
        processes.start(config.replicas, *place, heartbeat=heartbeat)
        train.run(config, names, out, restart=restart)
    except UserError as error:
        parser.error(str(error))
    except journal.Interrupted as stop:
        if processes.is_first():
            print(stop, file=sys.stderr)
        return _BY_USER if stop.by_user else stopped
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return _BY_USER
    except OSError as error:
        print(f"stopped: {error}", file=sys.stderr)
        processes.leave(_NOT_WRITTEN)
        return _NOT_WRITTEN
    return 0


def _is_given(parser: argparse.ArgumentParser, flags: dict, name: str) -> bool:
    return name in flags and flags[name] != parser.get_default(name)


def _run_site(config, site: str, url: str, out: Path, flags: dict) -> int:
    if not site or not url:
        raise UserError("--site NAME and --run URL belong together: give both")
    every = flags.get("sync_every", one_site.EVERY)
    # Steps here are short: nobody is to wait long for a site that is not there.
    options = {"every": every, "grace": 5.0} | one_site.outer_side()
    one_site.run(config, site, url, out, **options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
