"""SGD under a trigger and a synchronizer, on one replica, to wrap."""

from typing import Any

import helpers
import jax
import numpy as np
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

# Two float32 programs of the same mathematics on numbers of order 1. Measured: 1e-7.
ATOL = 2e-6


def small(
    trigger=None, synchronizer=None, axis_name=None, inner=None, **options
) -> Any:
    return cd.adaptive_sync(
        optax.sgd(0.1, 0.9) if inner is None else inner,
        triggers.every_k(2) if trigger is None else trigger,
        synchronizers.reconcile() if synchronizer is None else synchronizer,
        axis_name,
        **options,
    )


NAMES = ("bias", "embed")


def alone(tx, gradients):
    params = {name: helpers.make_params()[name] for name in gradients[0]}
    return list(helpers.run_alone(tx, params, gradients))


def one_replica(steps, scale=1.0, names=NAMES):
    return [
        {name: scale * tree[name][0] for name in names}
        for tree in helpers.make_gradients(steps, 1)
    ]


def close(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=ATOL),
        actual,
        expected,
    )
