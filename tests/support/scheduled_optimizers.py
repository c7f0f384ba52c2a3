"""Optimizers whose counters say when a sync is due."""

import helpers
import jax
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS, REPLICAS, STEPS = helpers.AXIS, 2, 9
DECAY = optax.linear_schedule(0.3, 0.1, STEPS)


def synced(trigger, synchronizer=None, **options):
    synchronizer = synchronizer or synchronizers.reconcile(momentum=False)
    inner = optax.sgd(0.1, 0.9)
    return cd.adaptive_sync(inner, trigger, synchronizer, AXIS, **options)


OPTIMIZERS = {
    "every_k": lambda: synced(triggers.every_k(3)),
    "always": lambda: synced(triggers.always()),
    "never": lambda: synced(triggers.never()),
    "evenly": lambda: synced(triggers.evenly(0.3, cost=1.0)),
    "weighted": lambda: synced(triggers.weighted(0.3, range(20, 0, -1), cost=1.0)),
    "quadratic": lambda: synced(triggers.quadratic_period(DECAY, 0.4)),
    "combined": lambda: synced(
        triggers.any_of(
            triggers.after_steps(triggers.delayed(triggers.every_k(5)), 2),
            triggers.at_most_every(triggers.at_least_every(triggers.never(), 3), 2),
        )
    ),
    "gradients": lambda: synced(triggers.every_k(3), synchronizers.average_gradients()),
    "fragments": lambda: synced(
        triggers.every_k(2), synchronizers.reconcile(fragments=2)
    ),
    "local_muon": lambda: cd.local_muon(0.1, budget=0.2, axis_name=AXIS),
    "rising momentum": lambda: cd.local_muon(
        0.1, budget=0.2, axis_name=AXIS, momentum=optax.linear_schedule(0.8, 0.95, 9)
    ),
    "diloco": lambda: cd.presets.diloco(0.1, 3, axis_name=AXIS),
    "muloco": lambda: cd.presets.muloco(0.1, 3, axis_name=AXIS),
    "local_sgd": lambda: cd.presets.local_sgd(0.1, 3, axis_name=AXIS),
    "synchronous_dion": lambda: cd.presets.synchronous_dion(0.1, axis_name=AXIS),
}


QUICK = ("every_k", "fragments", "local_muon", "combined")


def some(names):
    return [
        pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in names
    ]


def placed(tx):
    mesh = cd.replicas.make_mesh(REPLICAS)
    return mesh, helpers.start(tx, helpers.make_params(), mesh)


def of_rows(train):
    """The step for gradients [replicas, ...], of which a replica has one row."""
    return lambda state, batch: train(state, jax.tree.map(lambda g: g[0], batch))
