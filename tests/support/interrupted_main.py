"""The example's main job, whose process 1 gets signals while it makes a batch.

python tests/support/interrupted_main.py never ARGUMENTS...
python tests/support/interrupted_main.py STEP ARGUMENTS...
python tests/support/interrupted_main.py STEP:SIGKILL ARGUMENTS...
python tests/support/interrupted_main.py STEP:full ARGUMENTS...

With `full` it gets none, and can write no array from that step on. Otherwise, Ctrl-C
if none is named; for that, and for SIGTERM, which comes twice, the other processes wait
until JAX knows of it.
"""

import json
import resource
import signal
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/char_lm"))

import data
import jax
import journal
import launch
import main
from jax._src import compiler, distributed

# A run small enough for tests. Those with equal flags share what they compile.
MICRO = (
    "--layers 1 --width 16 --heads 1 --sequence-length 16 --batch 1 --replicas 4 "
    "--steps 9 --evaluation-batches 1 --evaluate-every 3 --checkpoint-every 3 "
    "--method diloco --sync-every 2 --heartbeat-timeout 10"
).split()
# The key under which JAX's preemption service tells all processes (jaxlib 0.10).
NOTICE = "RECEIVED_PREEMPTION_NOTICE"
MILLISECONDS = 60_000

original = data.Corpus.training_batch


def training_batch(self, seed, *arguments):
    """The batch; at this step nothing goes on until the service knows of the signal."""
    step, _, name = sys.argv[1].partition(":")
    if str(seed[1]) != step or jax.process_index() != 1:
        return original(self, seed, *arguments)
    if name == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    else:
        signal.raise_signal(signal.Signals[name or "SIGINT"])
        distributed.global_state.client.blocking_key_value_get(NOTICE, MILLISECONDS)
        if name:
            signal.raise_signal(signal.Signals[name])
    return original(self, seed, *arguments)


def commands(
    text: Path, out: Path, number: int, signals: str = "never"
) -> list[list[str]]:
    """A command for each process."""
    place = ["--coordinator", f"localhost:{launch.free_port()}"]
    place += ["--num-processes", str(number)]
    files = ["--data", str(text), "--out", str(out)]
    same = [__file__, signals, *MICRO]
    same += [*files, *place]
    return [[*same, "--process-id", str(index)] for index in range(number)]


def results(out: Path) -> tuple[list, list]:
    """Summary and journal without the seconds."""
    summary = json.loads((out / "summary.json").read_text())
    (file,) = out.glob("*.jsonl")  # of the one method
    lines = journal.read_journal(file)
    for row in (*summary, *lines):
        row.pop("seconds")
    return summary, lines


def keep_programs_of_all_processes() -> None:
    """Not only those of process 0, which others cannot use on CPU (JAX 0.10)."""
    state = types.SimpleNamespace(process_id=0, client=None)
    compiler.distributed = types.SimpleNamespace(global_state=state)


if __name__ == "__main__":
    keep_programs_of_all_processes()
    data.Corpus.training_batch = training_batch
    sys.exit(main.main(sys.argv[2:]))
