"""The example's main job, whose process 1 gets a signal while it makes a batch.

python tests/interrupted_main.py STEP ARGUMENTS...
python tests/interrupted_main.py STEP:SIGKILL ARGUMENTS...

Ctrl-C if none is named; for that the other processes wait until JAX knows of it.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/char_lm"))

import data
import jax
import main
from jax._src import distributed

# The key under which JAX's preemption service tells all processes (jaxlib 0.10).
NOTICE = "RECEIVED_PREEMPTION_NOTICE"
MILLISECONDS = 60_000

original = data.Corpus.training_batch


def training_batch(self, seed, *arguments):
    """The batch; at this step nothing goes on until the service knows of the signal."""
    step, _, name = sys.argv[1].partition(":")
    if seed[1] == int(step) and jax.process_index() == 1:
        signal.raise_signal(signal.Signals[name or "SIGINT"])
        distributed.global_state.client.blocking_key_value_get(NOTICE, MILLISECONDS)
    return original(self, seed, *arguments)


if __name__ == "__main__":
    data.Corpus.training_batch = training_batch
    sys.exit(main.main(sys.argv[2:]))
