"""What a sync with a delay hides behind, in programs compiled for several TPU slices.

    python -m pip install libtpu
    python benchmarks/tpu/overlap.py                # tiny: half a minute a program
    python benchmarks/tpu/overlap.py --sizes 160m
    python benchmarks/tpu/overlap.py --sizes tiny 160m --slices 4 --forms "2 bits"
    python benchmarks/tpu/overlap.py --table

Each slice is a replica. A program is of several steps (`replicas.steps`), on the last
of which a sync ends that began with the last of the program before, and the next
begins; or, without a delay, of as many steps with a sync on the last. Between slices
arrays are sent by `send` and have arrived by `recv-done`: what the schedule has between
the two is done while they are under way. Nothing is run. What `overlap.jsonl` holds is
not compiled again.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import loops
import programs
import traffic
from programs import Place

from curvadion_jax import compressors

RESULTS = Path(__file__).with_name("overlap.jsonl")
FORMS = {"exact": None, "2 bits": compressors.quantize(2)}
# Steps of a program, and the delay.
CASES = ((4, 4), (4, 0))
_WORK = ("fusion", "convolution", "dot", "custom-call")


def examine(
    slices: int, size: str, form: str, steps: int, delay: int
) -> dict[str, Any]:
    """Compiles a program and reads its schedule."""
    mesh = Place("v5e:4x4", slices, slices, (("fsdp", 16),)).mesh()
    tx = programs.delayed(steps, FORMS[form], delay)
    built = programs.build(programs.SIZES[size], "local_muon", mesh, tx, steps)
    ends = [steps - 1] if delay else []
    lowered = built.step.lower(built.state, built.batch, begins=[steps - 1], ends=ends)
    clock = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=dump)
        (text,) = Path(folder).glob("*.after_optimizations.txt")
        reader = traffic.Reader(text.read_text(), mesh.size // slices, slices)
    return {
        "compile_seconds": round(time.perf_counter() - clock),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "messages": messages(reader),
    }


def messages(reader: traffic.Reader) -> list[dict[str, Any]]:
    """What is sent between slices, in order, and the work until it has arrived."""
    entry = reader.program.computations[reader.program.entry]
    work = [_work(reader, each) for each in entry]
    at = {each.name: index for index, each in enumerate(entry)}
    met = lambda x: re.findall(r'rendezvous="([^"]+)"', x.attributes)  # noqa: E731
    sends = {met(x)[0]: x for x in entry if x.opcode == "send"}
    recvs = {x.name: met(x)[0] for x in entry if x.opcode == "recv"}
    found = []
    for done in (x for x in entry if x.opcode == "recv-done"):
        (recv,) = (x for x in done.operands if x in recvs)
        send = sends[recvs[recv]]
        start, end = at[send.name], at[done.name]
        found.append(
            {
                "shape": re.sub(r"\{.*", "", send.shape.lstrip("(")),
                "starts": sum(work[:start]) / sum(work),
                "arrives": sum(work[:end]) / sum(work),
                "loops": sum(x.opcode == "while" for x in entry[start:end]),
            }
        )
    return sorted(found, key=lambda x: x["starts"])


def _work(reader: traffic.Reader, each: Any) -> int:
    """How many fusions and products an instruction executes."""
    if each.opcode in _WORK:
        return 1
    inside = [
        sum(_work(reader, x) for x in reader.program.computations[name])
        for name in each.called
    ]
    if each.opcode == "while":
        return sum(inside) * (loops.passes(reader.program, each) or 1)
    return max(inside, default=0) if each.opcode in ("conditional", "call") else 0


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown, a row for each message."""
    head = (
        "slices",
        "model",
        "form",
        "steps",
        "delay",
        "message",
        "sent at",
        "arrives by",
    )
    head = (*head, "loops between", "compile, s", "temporary, MiB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for record in records:
        case, ends = list(record["case"].values()), ("", "")
        for index, each in enumerate(record["messages"]):
            last = index == len(record["messages"]) - 1
            if last:
                temporary = f"{record['temporary'] / 2**20:,.0f}"
                ends = (record["compile_seconds"], temporary)
            cells = (
                *(case if index == 0 else [""] * len(case)),
                *(each["shape"], f"{each['starts']:.1%}", f"{each['arrives']:.1%}"),
                *(each["loops"], *ends),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=["tiny"])
    parser.add_argument("--slices", type=int, default=2, help="each is a replica")
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(_records(options.results))))
        return
    versions = {x: importlib.metadata.version(x) for x in ("jax", "libtpu", "optax")}
    for size in options.sizes:
        for form in options.forms:
            for steps, delay in CASES:
                case = {"slices": options.slices, "size": size, "form": form}
                case |= {"steps": steps, "delay": delay}
                if any(x["case"] == case for x in _records(options.results)):
                    continue
                print(case, flush=True)
                day = datetime.datetime.now(datetime.UTC).date().isoformat()
                record = {"case": case, "date": day, "versions": versions}
                record |= examine(*case.values())
                with options.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
