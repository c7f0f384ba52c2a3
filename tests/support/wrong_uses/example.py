"""The example `examples/char_lm`: its text, its token shards and its flags."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import main
import methods
import numpy as np
import report
from config import UserError

from wrong_uses.case import Case

HEADER = [20240520, 1]


def write_shard(file: Path, tokens, header=(), count=None, dtype="<u2") -> Path:
    """A token shard, or nearly one."""
    start = np.zeros(256, "<i4")
    start[:3] = *(header or HEADER), len(tokens) if count is None else count
    file.write_bytes(start.tobytes() + np.asarray(tokens, dtype).tobytes())
    return file


def reading(name: str, given: str, advice: str, **files: Any) -> Case:
    """Loads a directory of these files, and makes a batch of 16 tokens a sequence."""

    def do(folder):
        for path, content in files.items():
            file = folder / path.replace("_dot_", ".")
            file.write_bytes(content)
        data.load(str(folder)).training_batch((0, 0), 1, 16)

    return Case(name, do, UserError, given, advice)


def shard(name: str, given: str, advice: str, **changed: Any) -> Case:
    def do(folder):
        write_shard(folder / "train_0.bin", [1, 2, 3], **changed)
        data.read_shard(folder / "train_0.bin")

    return Case(name, do, UserError, given, advice)


def flags(arguments: str, given: str, advice: str) -> Case:
    """A command line of main.py; FOLDER in it is an empty folder."""

    def do(folder: Path) -> None:
        place = [part.replace("FOLDER", str(folder)) for part in arguments.split()]
        main.main([*place, "--out", str(folder / "out")])

    return Case(f"main.py {arguments}", do, SystemExit, given, advice)


def running(name: str, prepare: Callable[[Path], Any], given: str, advice: str) -> Case:
    """main.py on text of its own, with something in the way of --out."""

    def do(folder: Path) -> None:
        (folder / "a.txt").write_text("all work and no play " * 99)
        prepare(folder / "out")
        text = str(folder / "a.txt")
        main.main(["--data", text, "--out", str(folder / "out"), "--replicas", "2"])

    return Case(name, do, SystemExit, given, advice)


def other_settings(folder: Path) -> None:
    settings = {"seed": 0, "width": 16}
    for seed in (0, 1):
        report.open_directory(
            folder / "out", settings | {"seed": seed}, methods.METHODS, False
        )


def damaged(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"seed": 0})[:5])


def no_validation(folder: Path) -> None:
    write_shard(folder / "train_0.bin", [1, 2, 3])
    data.load(str(folder))


def large_tokens(folder: Path) -> None:
    write_shard(folder / "train_0.bin", [60_000] * 9)
    write_shard(folder / "val_0.bin", [1] * 9)
    data.load(str(folder)).training_batch((0, 0), 1, 4)


def short_held_out(folder: Path) -> None:
    (folder / "a.txt").write_text("all work and no play")
    data.load(str(folder)).validation_batch(0, 1, 1, 16)


CASES = [
    reading("an empty directory of text", "FOLDER: no text", "give a text file"),
    reading("a file of blanks", "FOLDER: no text", "give a text file", a_dot_txt=b" "),
    reading(
        "a file with NUL bytes as text",
        *("FOLDER/a.txt has NUL bytes", "take it out"),
        a_dot_txt=b"a\0b",
    ),
    reading(
        "text beside token shards",
        *(
            "mixes token shards with other files (FOLDER/a.txt)",
            "give a directory of one kind",
        ),
        **{"a_dot_txt": b"a", "b_dot_bin": b"b"},
    ),
    reading(
        "text shorter than a sequence",
        *("has 5 tokens", "give more text or a smaller --sequence-length"),
        a_dot_txt=b"short",
    ),
    Case(
        "text too short to hold any of it out",
        short_held_out,
        *(UserError, "has 1 tokens", "give more text or a smaller --sequence-length"),
    ),
    Case(
        "text that is not there",
        lambda folder: data.load(str(folder / "nothing")),
        *(UserError, "--data FOLDER/nothing", "give one, or leave --data out"),
    ),
    Case(
        "one token shard in place of their directory",
        lambda folder: data.load(str(write_shard(folder / "train_0.bin", [1, 2]))),
        *(UserError, "FOLDER/train_0.bin", "give the directory of the token shards"),
    ),
    Case(
        "token shards without one for validation",
        no_validation,
        *(
            UserError,
            "1 training shards and 0 validation",
            "give a directory with both",
        ),
    ),
    Case(
        "tokens of another vocabulary",
        large_tokens,
        *(UserError, "token 60000 is outside", "give shards of GPT-2 tokens"),
    ),
    shard(
        "a shard of another kind",
        *("starts with 20240521, 1", "give shards as modded-nanogpt writes them"),
        header=[20240521, 1],
    ),
    shard(
        "a shard of another version",
        *("starts with 20240520, 2", "give shards as modded-nanogpt writes them"),
        header=[20240520, 2],
    ),
    shard("a shard that is cut off", "has 1030 bytes", "copy it again", count=5),
    shard("a shard of -1 tokens", "promises -1 tokens", "copy it again", count=-1),
    shard(
        "a shard of int32 tokens",
        *("has 1036 bytes", "copy it again"),
        dtype="<i4",
    ),
    Case(
        "a shard shorter than its header",
        lambda folder: (
            (folder / "train_0.bin").write_bytes(b"12345"),
            data.read_shard(folder / "train_0.bin"),
        ),
        *(UserError, "has 5 bytes", "copy it again, or take it out"),
    ),
    Case(
        "going on with another seed",
        other_settings,
        *(UserError, "--seed was 0 and is now 1", "Give another --out, or --restart"),
    ),
    running(
        "going on where config.json is damaged",
        damaged,
        *("FOLDER/out/config.json cannot be read", "give another --out, or --restart"),
    ),
    running(
        "--out is a file",
        lambda out: out.write_text("in the way"),
        *("--out FOLDER/out cannot be written", "give a directory that can be made"),
    ),
    flags("--method sgd", "'sgd' is unknown", "give some of curvadion"),
    flags("--method paper,paper", "names paper twice", "name it once"),
    flags(
        "--method diloco --threshold 0.1",
        *("--threshold has no effect on diloco", "leave it out, or train one of these"),
    ),
    flags("--sync-every 5", "--sync-every has no effect on curvad", "leave it out, or"),
    flags(
        "--budget 0.1 --threshold 0.3",
        *("takes the place of curvadion's --budget", "leave one of them out"),
    ),
    flags("--short --steps 0", "got 0", "--steps must be at least 1"),
    flags("--width 30 --heads 4", "--width 30", "every head needs an even width"),
    flags("--rank 1.5", "got 1.5", "--rank must be a whole number from 1"),
    flags("--rank 0", "got 0", "--rank must be a whole number from 1"),
    flags("--steps 0", "got 0", "--steps must be at least 1"),
    flags("--replicas 0", "got 0", "--replicas must be at least 1"),
    flags("--seed -1", "got -1", "--seed must be at least 0"),
    flags("--learning-rate -1", "got -1.0", "must be positive and finite"),
    flags("--budget 0", "got 0.0", "must be positive and finite"),
    flags("--threshold nan", "got nan", "must be positive and finite"),
    flags("--data FOLDER/text", "--data FOLDER/text", "give one, or leave --data out"),
    flags(
        "--num-processes 2 --process-id 0",
        *("without --coordinator", "give every process all three"),
    ),
    flags(
        "--coordinator h:1 --num-processes 2",
        *("without --process-id", "give every process all three"),
    ),
    flags(
        "--coordinator h:1 --num-processes 2 --process-id 2",
        *("--process-id 2", "must be one of 0 to --num-processes - 1 = 1"),
    ),
    flags(
        "--coordinator h:1 --num-processes 2 --process-id -1",
        *("--process-id -1", "must be one of 0 to --num-processes - 1 = 1"),
    ),
    flags(
        "--coordinator h:1 --num-processes 0 --process-id 0",
        *("--num-processes 0", "must be at least 1"),
    ),
    flags(
        "--coordinator h:1 --num-processes 3 --process-id 0",
        *("--replicas 8", "give a multiple of 3"),
    ),
    flags(
        "--coordinator host --num-processes 2 --process-id 0",
        *("--coordinator host", "must be HOST:PORT"),
    ),
    flags("--distributed --process-id 0", "--process-id", "give one or the other"),
    flags("--heartbeat-timeout 0", "--heartbeat-timeout 0", "must be at least 1"),
]
