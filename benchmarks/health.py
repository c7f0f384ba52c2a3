"""What it costs at a sync to look whether everything is finite.

    taskset -c 0 python benchmarks/health.py

Steps of the optimizer that synchronise every time, with and without the passes over
gradients, parameters and state that find a poisoned replica. (Without them the program
is the same, but looks at one number of each only: the function of `_finite` that looks
is replaced while it is compiled.) The rest is as in `overhead.py`, whose options it
takes.
"""

import contextlib
import random
import statistics
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import overhead
from overhead_cases import AXIS, RATE

import curvadion_jax as cd
from curvadion_jax import _finite, compressors, synchronizers, triggers


def cases() -> dict[str, optax.GradientTransformation]:
    """Name -> optimizer that synchronises on every step."""
    always = {"trigger": triggers.always(), "axis_name": AXIS}
    average = synchronizers.average_gradients
    return {
        "`local_muon`": cd.local_muon(RATE, **always),
        "`dion`, `reconcile`": cd.adaptive_sync(
            cd.dion(RATE), synchronizer=synchronizers.reconcile(), **always
        ),
        "`synchronous_dion`": cd.presets.synchronous_dion(RATE, axis_name=AXIS),
        "`optax.adamw`, gradients averaged": cd.adaptive_sync(
            optax.adamw(RATE), synchronizer=average(), **always
        ),
        "`optax.adamw`, gradients averaged in 4 bits": cd.adaptive_sync(
            optax.adamw(RATE),
            synchronizer=average(compressors.quantize(4)),
            **always,
        ),
    }


@contextlib.contextmanager
def without_a_look():
    """Programs that are traced meanwhile look at one number of a tree only."""

    def glance(tree):
        arrays = [x for x in jax.tree.leaves(tree) if jnp.size(x)]
        return jnp.isfinite(arrays[0].reshape(-1)[0]) if arrays else jnp.array(True)

    with mock.patch.object(_finite, "all_finite", glance):
        yield


def main() -> None:
    options = overhead.parse(__doc__.splitlines()[0])
    where = overhead.setting(options)
    _, _, batch, *_ = where
    print("| optimizer, a sync on every step | seconds without | with a look |")
    print("|---|---|---|")
    order = random.Random(0)
    for name, tx in cases().items():
        if options.only not in name:
            continue
        programs = {"with": overhead.program(tx, *where)}
        with without_a_look():
            programs["without"] = overhead.program(tx, *where)
        rounds = [
            overhead.seconds(programs, batch, options.steps, order, synced=True)
            for _ in range(options.rounds)
        ]
        bare = statistics.median(each["without"] for each in rounds)
        more = overhead.longer(rounds, "with", "without")
        print(f"| {name} | {bare:.3f} | {more} |", flush=True)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {vars(options)}")


if __name__ == "__main__":
    main()
