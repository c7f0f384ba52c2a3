"""Compiles training steps for TPUs, without one, and reads what the programs do.

    python -m pip install libtpu
    python benchmarks/tpu/compile_steps.py --sizes tiny
    python benchmarks/tpu/compile_steps.py --sizes 160m --places v5e:4x4

prints a row as soon as a program is compiled: minutes each from 160m on. Nothing is
run: the numbers say what the compiler has planned, and none of it has been on a TPU.
Where the step number decides, it is the program of a sync.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Without it libtpu asks a cloud's metadata server where it is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing uses a chip, so several processes may load libtpu.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "links"))

import cost_model
import jax
import measuring
import programs
import traffic
from programs import AXIS, RANK, Place

FSDP_4, FSDP_16 = (("fsdp", 4),), (("fsdp", 16),)
BOTH_16, BOTH_64 = (("fsdp", 8), ("tensor", 2)), (("fsdp", 16), ("tensor", 4))
# Name -> chips; "x2" at the end are two slices, each a replica.
SMALL = {
    "v5e:4x4": Place("v5e:4x4", 1, 4, FSDP_4),
    "v5e:4x4x2": Place("v5e:4x4", 2, 2, FSDP_16),
    "v6e:4x4": Place("v6e:4x4", 1, 4, FSDP_4),
    "v6e:4x4x2": Place("v6e:4x4", 2, 2, FSDP_16),
}
LARGE = {
    "v5e:16x16": Place("v5e:16x16", 1, 4, BOTH_64),
    "v5e:8x8x2": Place("v5e:8x8", 2, 2, BOTH_64),
    "v6e:8x8": Place("v6e:8x8", 1, 4, BOTH_16),
    "v6e:4x4x2": Place("v6e:4x4", 2, 2, BOTH_16),
}
PLACES = {"tiny": SMALL, "160m": SMALL, "1b": SMALL, "8b": LARGE}
HEADER = (
    *("model", "chips", "optimizer", "a replica sends to others, MiB", "counted"),
    *("a chip sends inside, every step", "more at a sync"),
    *("largest put together inside", "of the largest parameter", "compile, s"),
    *("parameters a chip", "arguments", "temporary"),
)


def counted(params: Any, optimizer: str, replicas: int) -> float:
    """Bytes of one sync that the library's counters would count, of one replica."""
    size = cost_model.model_size(params, measuring.matrices(params))
    if optimizer in programs.SYNCHRONOUS:
        payload = cost_model.gradient_payload(size)
    elif optimizer.startswith("synchronous_dion"):
        payload = cost_model.factor_payload(size, RANK)
    else:
        payload = cost_model.compressors.quantize(2).payload(params)
    return cost_model.sync_bytes(payload, replicas)


def compiled(built: programs.Step) -> tuple[Any, str]:
    """The program, and its text."""
    with tempfile.TemporaryDirectory() as folder:
        # `compiled.as_text()` fails on some of these programs; the compiler's own files
        # hold the same text.
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered = built.step.lower(built.state, built.batch)
        program = lowered.compile(compiler_options=dump)
        texts = [x.read_text() for x in Path(folder).glob("*.after_optimizations.txt")]
    return program, max(texts, key=len)


def examine(size: str, where: str, optimizer: str) -> Iterator[str]:
    """The cells of a row."""
    place = PLACES[size][where]
    mesh = place.mesh()
    due = True if optimizer in programs.BY_STEP_NUMBER else None
    built = programs.build(programs.SIZES[size], optimizer, mesh, due)
    start = time.perf_counter()
    program, text = compiled(built)
    seconds = time.perf_counter() - start
    chips = mesh.size // place.replicas
    found = traffic.transfers(text, chips, place.slices)
    params = programs.parameters(programs.gpt(programs.SIZES[size]))
    across = chips * sum(x.sent for x in found if x.across)
    inside = [x for x in found if not x.across]
    whole = max((x.whole for x in inside), default=0)
    largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    yield from (size, where, optimizer)
    for sent in (
        *(across, counted(params, optimizer, mesh.shape[AXIS])),
        *(sum(x.sent for x in inside if x.at_sync is when) for when in (False, True)),
        whole,
    ):
        yield f"{sent / 2**20:,.3g}"
    yield f"{whole / largest:.2f}"
    yield f"{seconds:.0f}"
    yield f"{programs.device_bytes(built.state[0]) / 2**20:,.3g}"
    arguments, _, temporary = measuring.in_mebibytes(program)
    yield from (f"{arguments:,.3g}", f"{temporary:,.3g}")


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--sizes", nargs="*", choices=PLACES, default=["160m", "1b"])
    parser.add_argument("--places", nargs="*", help="all of a size by default")
    optimizers = [*programs.OPTIMIZERS]
    parser.add_argument(
        "--optimizers", nargs="*", choices=optimizers, default=optimizers
    )
    options = parser.parse_args()
    cases = [
        (size, place, optimizer)
        for size in options.sizes
        for place in PLACES[size]
        if not options.places or place in options.places
        for optimizer in options.optimizers
    ]
    measuring.table(HEADER, ([*examine(*case)] for case in cases))
    print(measuring.where(options))


if __name__ == "__main__":
    main()
