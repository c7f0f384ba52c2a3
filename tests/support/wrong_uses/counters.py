"""What is read of a state's counters."""

from typing import Any

import jax
import numpy as np

import curvadion_jax as cd
from curvadion_jax import metrics
from wrong_uses.build import INT, PARAMS, anchored, counted
from wrong_uses.case import calls, wrong


def without_axis() -> Any:
    """The state after two syncs of an optimizer that has no replica axis."""
    tx = cd.presets.local_sgd(0.1, 1)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(PARAMS, state, PARAMS)
    return state


def disagreeing() -> Any:
    state = jax.tree.map(lambda x: np.stack([x, x]), counted())
    return state._replace(metrics=state.metrics._replace(steps=np.array([3, 4])))


KNOWN = {"metrics": metrics, "params": PARAMS, "state": counted()}
_ROWS = [
    ("metrics.read(3)", ValueError, "found 0 in what is of type int", "give the opti"),
    ("metrics.read(params)", ValueError, "of type dict", "give the optimizer state"),
    ("metrics.observe(params)", ValueError, "of type dict", "give the optimizer stat"),
    (
        "metrics.read([state, state])",
        *(ValueError, "found 2 in what is of type list", "give the optimizer state of"),
    ),
    ("metrics.read(state)", ValueError, "replicas is None", "pass replicas, the numb"),
    ("metrics.read(state, replicas=0)", ValueError, "is 0", "give a whole number >= 1"),
    ("metrics.read(state, replicas='8')", TypeError, "is '8'", "give a whole number"),
    (
        "metrics.read(state, replicas=2, patience=0)",
        ValueError,
        "got 0",
        "must be at least 1",
    ),
    ("metrics.read(state, replicas=2, patience='x')", TypeError, "got 'x'", INT),
    wrong(
        "metrics.read(state of 2, replicas=8)",
        lambda: metrics.read(anchored()[1], replicas=8),
        *(ValueError, "replicas=8, and the counters are of 2", "leave it out"),
    ),
    wrong(
        "metrics.read of replicas that took other steps",
        lambda: metrics.read(disagreeing()),
        *(ValueError, "disagree on steps: [3, 4]", "restore a checkpoint"),
    ),
    wrong(
        "metrics.read(state without axis_name, replicas=8)",
        lambda: metrics.read(without_axis(), replicas=8),
        *(ValueError, "replicas=8, and 2 syncs have sent nothing", "give axis_name"),
    ),
]
CASES = calls(KNOWN, _ROWS)
