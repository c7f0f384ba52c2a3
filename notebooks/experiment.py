"""What the notebooks share: the example's program, other triggers, one run."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

# Eight CPU devices stand for eight replicas; before JAX starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "char_lm"))

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import methods
import numpy as np
import optax
import train
from config import PRESETS, Config
from journal import read_journal

import curvadion_jax as cd

# Fewer steps and a smaller batch than the example's default, so that the
# notebooks take 20 minutes.
config = dataclasses.replace(PRESETS["tiny"], steps=120, evaluate_every=120, batch=4)
if _steps := os.environ.get("CURVADION_NOTEBOOK_STEPS"):  # a small size for CI
    config = dataclasses.replace(
        config,
        steps=int(_steps),
        layers=1,
        width=32,
        heads=1,
        batch=1,
        sequence_length=32,
        evaluate_every=int(_steps),
        evaluation_batches=1,
    )


def few(settings: list) -> list:
    """All of these settings; the first two at the small size."""
    return settings[:2] if _steps else settings


_results = Path(os.environ.get("CURVADION_NOTEBOOK_RESULTS", "results"))
change = cd.triggers.relative_momentum_change


def at_steps(steps: Any) -> cd.triggers.Trigger:
    """A trigger that synchronises at given steps, counted from 0."""
    table = np.zeros(config.steps, bool)
    table[list(steps)] = True

    def decide(seen):
        return cd.triggers.decision(jax.numpy.asarray(table)[seen.steps])

    return cd.triggers.stateless(decide)


def recorded() -> cd.triggers.Trigger:
    """Measures the change on every step, and synchronises on the first alone."""
    measured = change(1.0)

    def decide(seen, state):
        decision, state = measured.decide(seen, state)
        return decision._replace(fire=jax.numpy.asarray(seen.steps == 0)), state

    return cd.triggers.Trigger(measured.init, decide)


def curvadion_with(*wanted: cd.triggers.Trigger) -> methods.Method:
    """What `curvadion` is made of, with another trigger.

    And a sync at the last step of a run of the usual length.
    """
    trigger = cd.triggers.any_of(*wanted, at_steps([config.steps - 1]))

    def build(config, axis):
        inner = cd.dion(**methods.curvadion_arguments(config), rank=1.0)
        synchronizer = cd.synchronizers.reconcile(
            optax.sgd(1.0, 0.4, nesterov=True),
            compressor=cd.compressors.quantize(2),
        )
        return cd.adaptive_sync(inner, trigger, synchronizer, axis)

    return methods.Method(build, frozenset())


def run(name: str, method: methods.Method, config: Config = config):
    """Trains, or reads what was trained before: (summary row, journal by column)."""
    methods.METHODS[name] = method
    out = _results / f"{name}_seed{config.seed}_batch{config.batch}"
    row = train.run(config, [name], out)[0]
    lines = read_journal(out / f"{name}.jsonl")
    columns = {key: [line.get(key) for line in lines] for key in lines[0]}
    value = [np.nan if v is None else v for v in columns["value"]]
    return row, columns | {"value": np.array(value, float)}
