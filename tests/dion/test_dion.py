"""dion: microsoft/dion's own numbers, learning rates, decay, the other optimizer."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from dion_runs import close, run, same_columns

import curvadion_jax as cd

# microsoft/dion rounds P and Q to float32; test_reference has the
# measurement, which is the same here: 2.1e-6 in X, 4.0e-7 in M, 2.6e-5 in Q.
MICROSOFT_ATOL = {"X": 5e-6, "M": 1e-6, "Q": 6e-5}
# Two float32 programs for the same step of size 0.1 to 0.3: measured 3e-8.
FLOAT32_ATOL = 2e-7

with np.load(
    Path(__file__).parents[1] / "support" / "vectors" / "microsoft_dion.npz"
) as _file:
    VECTORS = dict(_file)
SETTINGS = json.loads(str(VECTORS["provenance"]))
SHAPES = ("tall", "wide", "square")


@functools.cache
def microsoft_run(rank):
    """A compiled run of `dion` on parameters X, from M and Q; parameters move."""

    @jax.jit
    def scan(x, momentum, q, gradients, weight_decay):
        tx = cd.dion(
            SETTINGS["settings"]["learning_rate"],
            rank=rank,
            momentum=SETTINGS["settings"]["mu"],
            weight_decay=weight_decay,
            dimension_numbers=cd.DimensionNumbers(0, 1),
        )
        state = optax.tree.set(tx.init(x), momentum=momentum, dion_q=q)

        def one(carry, gradient):
            x, state = carry
            updates, state = tx.update(gradient, state, x)
            x = optax.apply_updates(x, updates)
            get = functools.partial(optax.tree.get, state)
            return (x, state), {"X": x, "M": get("momentum"), "Q": get("dion_q")}

        return jax.lax.scan(one, (x, state), gradients)[1]

    return scan


CASES = [
    pytest.param(case, marks=[] if case.startswith("full") else [pytest.mark.slow])
    for rank in ("full", "quarter")
    for decay in (0.0, 0.1)
    for first in ("", "-zero_first")
    if f"tall-{(case := f'{rank}-decay{decay}{first}')}" in SETTINGS["cases"]
]


@pytest.mark.parametrize("case", CASES)
def test_microsoft_dion(case):
    settings = SETTINGS["cases"][f"tall-{case}"]
    vectors = lambda key: {shape: VECTORS[f"{shape}-{case}/{key}"] for shape in SHAPES}

    def flax(key):  # (fan_out, fan_in) there, (fan_in, fan_out) here
        return {shape: x.transpose(0, 2, 1) for shape, x in vectors(key).items()}

    first = lambda tree: {shape: x[0] for shape, x in tree.items()}
    # Their first Q is normal, ours has unit columns. P does not depend on lengths.
    q = jax.tree.map(lambda q: q / np.linalg.norm(q, axis=0), first(vectors("Q")))
    with jax.enable_x64(True):
        result = microsoft_run(settings["rank_fraction"])(
            first(flax("X")), first(flax("M")), q, flax("G"), settings["weight_decay"]
        )
    for shape in SHAPES:
        for key in ("X", "M"):
            expected = flax(key)[shape][1:]
            close(result[key][shape], expected, MICROSOFT_ATOL[key], (shape, key))
        expected = vectors("Q")[shape][1:]
        same_columns(result["Q"][shape], expected, MICROSOFT_ATOL["Q"], shape)


@pytest.mark.slow
def test_learning_rates_decay_and_torch_kernels():
    """Matrices and all others at their own rates, and a kernel [fan_out, fan_in]."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (7, 4), "kernel": (4, 8)}
    params = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    gradients = {n: rng.normal(size=(3, *s)) for n, s in shapes.items()}
    gradients = jax.tree.map(np.float32, gradients)

    def updates(params, gradients, rate=0.1, **options):
        tx = cd.dion(rate, rank=1, **options)
        return run(tx, params, gradients, tx.init(params))[0]

    plain = updates(params, gradients)
    scheduled = updates(
        params,
        gradients,
        lambda count: 0.1 * (1 + count),
        adam_learning_rate=lambda count: 0.3,
    )
    factors = 1 + np.arange(3).reshape(-1, 1, 1)
    close(scheduled["kernel"], factors * plain["kernel"], FLOAT32_ATOL)
    close(scheduled["embedding"], 3 * plain["embedding"], FLOAT32_ATOL)
    torch = updates(
        {"kernel": params["kernel"].T},
        {"kernel": gradients["kernel"].transpose(0, 2, 1)},
        dimension_numbers=cd.DimensionNumbers(1, 0),
    )
    close(torch["kernel"].transpose(0, 2, 1), plain["kernel"], FLOAT32_ATOL)
