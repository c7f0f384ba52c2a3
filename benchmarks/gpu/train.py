"""Synchronous Muon against `local_muon`, 25 million parameters on an accelerator.

    python benchmarks/study/corpus.py                 # or carry its text.tar.xz there
    python benchmarks/gpu/train.py --limit 240        # stops in time; the same goes on

Eight replicas on one device, 16,384 tokens per replica and step, products of bfloat16:
the study's runs with a larger model (`benchmarks/study`). What ends is a line of
`runs.jsonl` in `--results`. With `--profile` it then traces eight steps of
`local_muon`, a sync among them, to `profile` there, for TensorBoard or Perfetto.
"""

import argparse
import dataclasses
import datetime
import hashlib
import json
import shutil
import signal
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[1:1] = [
    str(_ROOT / place)
    for place in (".", "examples/char_lm", "benchmarks", "benchmarks/study")
]

import corpus  # noqa: E402
import data  # noqa: E402
import jax  # noqa: E402
import simulate  # noqa: E402
import study  # noqa: E402
from rows import LOCAL_MUON, MUON  # noqa: E402
from simulate import Run, Size  # noqa: E402

SIZES = {
    "25m": Size(8, 512, 8, 512, 32, 256),
    "tiny": Size(1, 16, 1, 16, 2, 16),
}
RATE = 0.04


def text_of(path: Path | None) -> data.Corpus:
    """The study's text, from its archive if need be, or what is given."""
    archive = corpus.TEXT.with_suffix(".tar.xz")
    if path is None and not corpus.TEXT.exists() and archive.exists():
        corpus.unpack(archive, corpus.TEXT.parent)
    return data.load(str(path or corpus.TEXT))


def profile(text: data.Corpus, size: Size, folder: Path) -> None:
    """Traces eight steps of `local_muon`; the seventh synchronises."""
    run = Run(LOCAL_MUON, RATE, 0, 100)
    training = simulate.begin(run, text, size)
    step, batches = training.step, training.batches
    state = jax.block_until_ready(step(*training.state, batches.of(0)))  # compiled
    with jax.profiler.trace(str(folder)):
        for number in range(1, 9):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                state = jax.block_until_ready(step(*state, batches.of(number)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--limit", type=int, default=0, help="seconds; 0 is none")
    parser.add_argument("--text", type=Path, help="a folder of other text")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "train")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("stopped; the same goes on"))
    signal.alarm(options.limit)
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / "runs.jsonl"
    size, text = SIZES[options.size], text_of(options.text)
    done = study.rows_of(file)
    for method in (MUON, LOCAL_MUON):
        run = Run(method, RATE, 0, options.steps)
        row = {"run": dataclasses.asdict(run), "size": options.size}
        row["text"] = text.fingerprint
        if any(row.items() <= other.items() for other in done):
            continue
        key = hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]
        row |= simulate.simulate(run, text, options.results / key, size)
        row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        study.append(file, row | {"date": datetime.date.today().isoformat()})
        shutil.rmtree(options.results / key, ignore_errors=True)
        print(json.dumps(row), flush=True)
    if options.profile:
        profile(text, size, options.results / "profile")


if __name__ == "__main__":
    main()
