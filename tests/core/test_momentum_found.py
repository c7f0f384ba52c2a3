"""Where optimizers keep their momentum: found in every usual one, wrapped or not."""

from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from curvadion_jax.matrices._momentum import momentum_by_name

VECTORS = {
    "bias": True,
    "embed/embedding": True,
    "tall/kernel": False,
    "wide/kernel": False,
}
NAMES = set(helpers.SHAPES)
ADAM = optax.adam(0.1)
LABELS = {name: "a" if vector else "b" for name, vector in VECTORS.items()}


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        pytest.param(optax.sgd(0.1, momentum=0.9), NAMES, id="sgd"),
        pytest.param(optax.adam(0.1), NAMES, id="adam"),
        pytest.param(optax.lion(0.1), NAMES, id="lion"),
        pytest.param(optax.contrib.muon(0.1), NAMES, id="muon"),
        pytest.param(cd.dion(0.1), {"tall/kernel", "wide/kernel"}, id="dion"),
        pytest.param(optax.chain(optax.clip(1.0), optax.adamw(0.1)), NAMES, id="chain"),
        pytest.param(
            optax.masked(ADAM, VECTORS), {"bias", "embed/embedding"}, id="masked"
        ),
        pytest.param(
            optax.partition({"a": ADAM, "b": optax.sgd(0.1)}, LABELS),
            {"bias", "embed/embedding"},
            id="partition",
        ),
        pytest.param(
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
            NAMES,
            id="inject_hyperparams",
        ),
        pytest.param(optax.apply_if_finite(ADAM, 3), NAMES, id="apply_if_finite"),
        pytest.param(
            optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
            NAMES,
            id="MultiSteps",
        ),
    ],
)
def test_momentum_is_found(inner, names):
    params = helpers.make_params()
    found = momentum_by_name(inner.init(params), params)
    assert set(found) == names
    for name, momentum in found.items():
        assert momentum.shape == params[name].shape
    trigger = triggers.relative_momentum_change(0.1)
    tx: Any = cd.adaptive_sync(inner, trigger, synchronizers.average_gradients())
    jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)


def test_of_an_optimizer_with_both_trace_is_taken_and_mu_is_not():
    """The trace is of what Adam made of the gradients, and comes last."""
    inner = optax.chain(optax.scale_by_adam(), optax.trace(0.9))
    params = helpers.make_params()
    _, (adam, last) = inner.update(params, inner.init(params))
    found = momentum_by_name((adam, last), params)
    for name, trace in last.trace.items():
        assert found[name] is trace
        assert found[name] is not adam.mu[name]


class Encoder(NamedTuple):
    """Parameters whose names are those of optimizer states."""

    mu: jax.Array
    q: jax.Array
    trace: jax.Array


INNER = [optax.sgd(0.1, 0.9), optax.adam(0.1), optax.rmsprop(1, momentum=1)]


@pytest.mark.parametrize("inner", INNER)
def test_parameters_named_like_states_are_no_momentum(inner):
    params = Encoder(jnp.ones((2, 2)), jnp.ones((3, 2)), jnp.ones(4))
    found = momentum_by_name(inner.init(params), params._asdict())
    shapes = {name: momentum.shape for name, momentum in found.items()}
    assert shapes == {"mu": (2, 2), "q": (3, 2), "trace": (4,)}
