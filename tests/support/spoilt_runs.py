"""What the tests of faults share: optimizers, and runs in which replicas are spoilt."""

import functools
from typing import Any

import chex
import helpers
import jax
import numpy as np
import optax
import weighted_runs

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

AXIS = cd.replicas.AXIS
REPLICAS = 8
EVERY = 3
# Parameters plus an update may miss where all meet by a rounding.
ROUNDING = 1e-6
reconcile = synchronizers.reconcile


def syncing(inner, synchronizer):
    return cd.adaptive_sync(inner, triggers.every_k(EVERY), synchronizer, AXIS)


def sgd(synchronizer):
    return syncing(optax.sgd(0.1, 0.9), synchronizer)


def dion(synchronizer):
    return syncing(cd.dion(0.1, 2), synchronizer)


FOUR_BITS = compressors.quantize(4, block=8)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
OPTIMIZERS = {
    "gradients": lambda: sgd(synchronizers.average_gradients()),
    "factors": lambda: dion(synchronizers.average_factors()),
    "reconcile": lambda: sgd(reconcile()),
    "reconcile-dion": lambda: dion(reconcile()),
    "reconcile-outer": lambda: sgd(reconcile(NESTEROV)),
    "reconcile-quantize": lambda: sgd(reconcile(NESTEROV, compressor=FOUR_BITS)),
    "local_muon": lambda: cd.local_muon(
        0.1, weight_decay=0.1, axis_name=AXIS, trigger=triggers.every_k(EVERY)
    ),
}
QUICK = ("gradients", "reconcile-quantize")
NAMES = helpers.slow_but(QUICK, OPTIMIZERS)


@functools.cache
def prepare(name: str) -> Any:
    """A compiled step (state, gradients, weights) -> state, by vmap, and its start."""
    tx = OPTIMIZERS[name]()
    return weighted_runs.train_on(tx, REPLICAS), weighted_runs.start(tx, REPLICAS)


def run(name, gradients, weights=None, change=None):
    """States after every step; `change` maps (index, state) to what goes in."""
    step, state = prepare(name)
    history = []
    for index, tree in enumerate(gradients):
        if change is not None:
            state = change(index, jax.tree.map(np.array, state))
        weight = np.ones(REPLICAS) if weights is None else weights[index]
        state = jax.device_get(step(state, tree, np.float32(weight)))
        history.append(state)
    return history


def poisoned(gradients, step, replicas, number=np.nan):
    """The gradients, with such a number in those of some replicas on one step."""
    changed = [jax.tree.map(np.copy, tree) for tree in gradients]
    changed[step]["tall"][list(replicas), 0, 0] = number
    return changed


def arrays(state):
    """Those of parameters and of states, but the counters."""
    params, opt_state = state
    return params, opt_state._replace(metrics=(), trigger_state=())


def assert_finite(state):
    chex.assert_tree_all_finite(arrays(state))


def rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def without(index):
    return np.delete(np.arange(REPLICAS), index)


def spoil(state, where, index, number=np.nan):
    """The state with one number of a part of it replaced."""
    params, opt_state = state
    tree = {
        "parameters": params,
        "momentum": opt_state.inner_state,
        "residual": opt_state.sync_state.residual,
        "anchor": opt_state.sync_state.anchor,
    }[where]
    for x in jax.tree.leaves(tree):
        if x.ndim > 1 and x.dtype.kind == "f" and x.size:
            x[index].reshape(-1)[0] = number
            return True
    return False


@functools.cache
def spoilt(name, where, index=2):
    """States of three steps, one replica of which is spoilt in front of the last one,
    which synchronises; None if it has no such part."""
    there = []

    def change(step, state):
        if step == 2:
            there.append(spoil(state, where, index, -np.inf))
        return state

    history = run(name, helpers.make_gradients(4, REPLICAS)[:3], change=change)
    return history if there[0] else None
