"""The example's main job, whose process 1 gets Ctrl-C while it makes a batch.

python tests/interrupted_main.py STEP ARGUMENTS...
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
    if seed[1] == int(sys.argv[1]) and jax.process_index() == 1:
        signal.raise_signal(signal.SIGINT)
        distributed.global_state.client.blocking_key_value_get(NOTICE, MILLISECONDS)
    return original(self, seed, *arguments)


if __name__ == "__main__":
    data.Corpus.training_batch = training_batch
    sys.exit(main.main(sys.argv[2:]))
