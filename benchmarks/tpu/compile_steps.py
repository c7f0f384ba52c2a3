"""Compiles training steps for TPUs, without one, and reads what the programs do.

    python -m pip install libtpu
    python benchmarks/tpu/compile_steps.py                    # all; hours on two cores
    python benchmarks/tpu/compile_steps.py --sizes 160m --places v5e:4x4
    python benchmarks/tpu/compile_steps.py --table

What `results.jsonl` holds already is not compiled again. Nothing is run: the numbers
say what the compiler has planned, and none of it has been on a TPU.
"""

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Without it libtpu asks a cloud's metadata server where it is.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.insert(0, str(Path(__file__).parents[1]))

import cost_model
import jax
import programs
import rows
import traffic
from programs import AXIS, Place

from curvadion_jax import _partition, _payload

RESULTS = Path(__file__).with_name("results.jsonl")
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
SHOWN = 4
# What records of before call otherwise.
_RENAMED = {"curvadion": "local_muon"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled."""

    size: str
    place: str
    optimizer: str

    def key(self) -> dict[str, str]:
        """What it is known by in the results."""
        return dataclasses.asdict(self)


def counted(size: programs.Size, optimizer: str, replicas: int) -> float:
    """Bytes of one sync that the library's counters would count, of one replica."""
    params = programs.parameters(programs.gpt(size))
    if optimizer in programs.SYNCHRONOUS:
        payload = cost_model.gradient_payload(cost_model.model_size(params))
        return cost_model.sync_bytes(payload, replicas)
    state = jax.eval_shape(programs.OPTIMIZERS[optimizer]().init, params)
    views = _partition.matrix_views(params, None)
    sync = programs.SYNCHRONIZERS[optimizer]
    payload = sync.payload(params, state.inner_state, views)
    payload += _payload.WEIGHT
    return round(cost_model.sync_bytes(payload, replicas))


def examine(case: Case, keep: Path | None) -> dict[str, Any]:
    """Compiles a case and reads the program, of which `keep` gets the text."""
    size, place = programs.SIZES[case.size], PLACES[case.size][case.place]
    mesh = place.mesh()
    built = programs.build(size, case.optimizer, mesh)
    parameters = jax.tree.leaves(built.state.params)
    lead = 1 if case.optimizer in programs.SYNCHRONOUS else place.replicas
    found: dict[str, Any] = {
        "replicas": place.replicas,
        "inner": dict(place.inner),
        "slices": place.slices,
        "parameters": sum(x.size for x in parameters) // lead,
        "parameter_bytes": programs.device_bytes(built.state.params),
        "largest_parameter_bytes": max(x.size * x.dtype.itemsize for x in parameters)
        // lead,
    }
    clock = time.perf_counter()
    lowered = built.step.lower(built.state, built.batch)
    found["lower_seconds"] = round(time.perf_counter() - clock, 1)
    clock = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # `compiled.as_text()` fails on some of these programs; the compiler's own files
        # hold the same text.
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = None
        try:
            compiled = lowered.compile(compiler_options=dump)
        except jax.errors.JaxRuntimeError as error:
            # Mostly too little memory, which shows at the end: the files are there.
            found["error"] = str(error)[:4000]
        found["compile_seconds"] = round(time.perf_counter() - clock, 1)
        texts = [x.read_text() for x in Path(folder).glob("*.after_optimizations.txt")]
        if keep:
            name = re.sub(r"[^\w]+", "-", " ".join(case.key().values()))
            shutil.copytree(folder, keep / name, dirs_exist_ok=True)
    if compiled is not None:
        memory = compiled.memory_analysis()
        found["memory"] = {
            kind: getattr(memory, f"{kind}_size_in_bytes")
            for kind in ("argument", "output", "alias", "temp", "generated_code")
        }
        found["moved"] = _moved(built.state, compiled.output_shardings[0])
    if texts:
        chips = mesh.size // place.replicas
        found |= _read(traffic.Reader(texts[0], chips, place.slices))
        across = found["sent"]["across, at syncs"] + found["sent"]["across, always"]
        found["across_bytes"] = across * chips
        found["counted_bytes"] = counted(size, case.optimizer, mesh.shape[AXIS])
    return found


def _moved(state: Any, shardings: Any) -> list[str]:
    """Parts of the state that the step returns divided in another way."""
    pairs = zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(shardings), strict=True
    )
    return [
        f"{jax.tree_util.keystr(path)}: {x.sharding.spec} -> {after.spec}"
        for (path, x), after in pairs
        if not x.sharding.is_equivalent_to(after, x.ndim)
    ]


def _read(reader: traffic.Reader) -> dict[str, Any]:
    """Bytes that a chip sends, the largest transfers and arrays, and the flag."""
    transfers = reader.transfers()
    sent, by_file, largest = {}, {}, {}
    for across in (True, False):
        for at_sync in (False, True):
            part = [x for x in transfers if (x.across, x.at_sync) == (across, at_sync)]
            name = f"{'across' if across else 'inside'}, "
            name += "at syncs" if at_sync else "always"
            sent[name] = sum(x.sent for x in part)
            files = collections.Counter()
            for each in part:
                files[each.source.partition(":")[0]] += each.sent
            by_file[name] = dict(files.most_common(SHOWN))
            part.sort(key=lambda x: -x.whole)
            largest[name] = [x._asdict() for x in part[:SHOWN]]
    flag = reader.flag()
    return {
        "sent": sent,
        "sent_by_file": by_file,
        "largest": largest,
        "arrays": reader.largest_arrays(2 * SHOWN),
        "flag": flag and flag._asdict(),
    }


def in_a_process(case: Case, keep: Path | None) -> dict[str, Any]:
    """`examine` in a process of its own, since the compiler may abort it."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_answer, args=(theirs, case, keep))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGABRT:
            return {"error": "the compiler aborted the process"}
        raise RuntimeError(f"{case} ended with exit code {child.exitcode}") from None
    finally:
        child.join()


def _answer(pipe: Any, case: Case, keep: Path | None) -> None:
    pipe.send(examine(case, keep))


def read_results(path: Path) -> list[dict[str, Any]]:
    """All records of a file that may not exist."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        name = record["case"]["optimizer"]
        record["case"]["optimizer"] = _RENAMED.get(name, name)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=["160m", "1b", "8b"])
    parser.add_argument("--places", nargs="*", help="all of a size by default")
    parser.add_argument("--optimizers", nargs="*", default=list(programs.OPTIMIZERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="folder for the compiler's files")
    parser.add_argument("--table", action="store_true", help="print what is there")
    options = parser.parse_args()
    if options.table:
        print("\n".join(rows.lines(read_results(options.results))))
        return
    cases = [
        Case(size, place, optimizer)
        for size in options.sizes
        for place in PLACES[size]
        if not options.places or place in options.places
        for optimizer in options.optimizers
    ]
    packages = ("jax", "jaxlib", "libtpu", "optax")
    versions = {name: importlib.metadata.version(name) for name in packages}
    for case in cases:
        if any(x["case"] == case.key() for x in read_results(options.results)):
            continue
        print(case, flush=True)
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        record = {"case": case.key(), "date": day, "versions": versions}
        record |= in_a_process(case, options.keep)
        with options.results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
