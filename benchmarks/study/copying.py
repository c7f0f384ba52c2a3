"""When a model learns to copy from its context, in a run of the study.

    python benchmarks/study/copying.py "`local_muon`" 0

Trains the first 520 of 1,040 steps with that seed, 20 minutes of a core. Every 20 it
prints the held-out loss, and how much lower the loss is on 256 held-out strings of 64
bytes when they come a second time. A model that does not look back finds the second
time harder, since text rarely begins again in the middle of a context.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import corpus
import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import study
from simulate import Run, Size, begin, evaluation

import curvadion_jax as cd


def main() -> None:
    method, seed = sys.argv[1], int(sys.argv[2])
    rate = study.best_rate(study.read(), method) or 0.0
    text, size = data.load(str(corpus.TEXT)), Size(evaluation=256)
    run = Run(method, rate, seed, study.STEPS)
    training = begin(run, text, size)
    gpt, state = training.gpt, training.state
    evaluate, held_out = evaluation(gpt, size, text), text.validation[0]
    starts = np.random.default_rng(5).integers(0, held_out.size - 65, 256)
    once = held_out[starts[:, None] + np.arange(64)].astype(np.int32)
    twice = jnp.concatenate([once, once, once[:, :1]], axis=1)

    @jax.jit
    def copied(params):
        mean = cd.replicas.consensus(params)
        logits = gpt.apply({"params": mean}, twice[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, twice[:, 1:])
        return losses[:, 8:63].mean() - losses[:, 72:127].mean()

    for number in range(1, study.STEPS // 2 + 1):
        state = training.step(*state, training.batches.of(number - 1))
        if number % 20 == 0:
            loss, gain = evaluate(state[0]), float(copied(state[0]))
            print(f"{number} {loss:.4f} {gain:.3f}", flush=True)


if __name__ == "__main__":
    main()
