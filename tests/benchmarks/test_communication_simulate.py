"""One run of the study, its replicas simulated on one device, whole and in pieces."""

import dataclasses

import chex
import data
import jax
import jax.numpy as jnp
import numpy as np
import pieces
import pytest
import simulate as simulation
from runs import Run
from simulate import simulate
from sizes import SIZES

import curvadion_jax as cd

QUICK = Run("sgd", 0.1, trigger="every 2", sync="reconcile", steps=3, replicas=2)


@pytest.fixture(scope="module")
def corpus():
    return data.load(None)


@pytest.mark.slow
def test_a_simulated_run(corpus):
    found = simulate(QUICK, SIZES["test"], corpus)
    again = simulate(QUICK, SIZES["test"], corpus)
    other = simulate(QUICK.but(seed=1), SIZES["test"], corpus)
    assert list(found["curve"]) == [2, 3]
    assert found["loss"] == found["curve"][3] == again["loss"] != other["loss"]
    # Steps 2 and 3: the last one always synchronises. Two replicas send each payload
    # once; the flag's 4 bytes come on every step, and those of a weight at every sync.
    assert found["syncs"] == 2
    assert 3 * (found["bytes"] - 3 * 4 - 2 * 4) == 2 * found["synchronous_bytes"]
    assert found["divergence"] < 1e-6


@pytest.mark.slow
def test_products_in_bfloat16(corpus):
    wide = SIZES["test"]
    narrow = dataclasses.replace(wide, products="bfloat16", at_once=2)
    one, other = (simulate(QUICK, size, corpus)["loss"] for size in (wide, narrow))
    assert one != other == pytest.approx(one, rel=1e-2)  # 8 bits of a mantissa


def test_weights_are_averaged_by_their_age():
    run = QUICK.but(steps=3, weight_average=2 / 3)  # an age of two steps
    averaged = simulation.averaged(run)
    seen = np.array([3.0, -1.0, 5.0], np.float32)
    state = averaged.init(jnp.zeros(2))
    for value in seen:
        _, state = averaged.update(jnp.array([value, 1.0]), state)
    counts = 0.5 ** np.arange(2, -1, -1)
    wanted = [np.average(seen, weights=counts), 1.0]
    found = simulation.weights_average(state, run)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # a rounding or two
    with pytest.raises(ValueError, match=r"at least a step, got 0\.75"):
        simulation.averaged(run.but(weight_average=0.25))


@pytest.mark.slow
def test_the_loss_is_of_the_average_and_the_curve_is_not(corpus):
    size, run = SIZES["test"], QUICK.but(steps=4)
    plain, one, two = (
        simulate(run.but(weight_average=age), size, corpus) for age in (0, 1 / 4, 1 / 2)
    )
    assert plain["curve"] == one["curve"] == two["curve"]
    assert one["loss"] == plain["loss"] == plain["curve"][4] != two["loss"]


@pytest.mark.slow
def test_a_run_in_pieces_is_the_same_run(corpus, tmp_path):
    run = QUICK.but(
        inner="local_muon",
        last_momentum=0.95,
        compressor="int 2",
        outer="nesterov 1.0 0.4",
        weight_average=0.5,
    )
    # A step in a piece; the third piece is over before it has begun.
    answers = iter([False, True] * 2 + [True] + [False, True])

    class Short(pieces.Piece):
        def is_over(self):
            return next(answers)

    *kept, last = (
        simulate(run, SIZES["test"], corpus, Short(tmp_path, 0.0)) for _ in range(4)
    )
    assert kept == [None] * 3
    seconds = cd.checkpoint.read_extra(tmp_path)["seconds"]
    whole = simulate(run, SIZES["test"], corpus)
    assert last["cpu_seconds"] > seconds > 0
    assert last | {"cpu_seconds": 0} == whole | {"cpu_seconds": 0}


def test_losses_and_gradients_of_a_part_at_once_are_those_of_all(corpus):
    size = SIZES["test"]
    gpt = simulation.transformer(size, corpus)
    params = simulation.on_replicas(simulation.parameters(gpt, QUICK, size), 2)
    # What starts at zero would keep the gradients of all before it at zero.
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    batch = simulation.batch_of(QUICK, size, corpus, 1)
    whole, parts = (
        jax.jit(lambda p, b, n=n: simulation.losses_and_gradients(gpt, p, b, n))(
            params, batch
        )
        for n in (None, 2)
    )
    assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole)) > 1e-4
    # Sums of 8 sequences in another order.
    chex.assert_trees_all_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_budget_pays_for_the_last_sync(corpus):
    # A sync sends what an all-reduce of the gradients does; the last step takes one.
    found = simulate(QUICK.but(trigger="evenly 0.45", steps=8), SIZES["test"], corpus)
    assert found["syncs"] == 3  # of 8 x 0.45 = 3.6: at 4, 7 and 8
    assert found["divergence"] < 1e-6


@pytest.mark.slow
def test_replicas_see_the_same_tokens_however_many_they_are(corpus):
    synchronous = QUICK.but(trigger="always", sync="gradients")
    losses = [
        simulate(synchronous.but(replicas=number), SIZES["test"], corpus)["loss"]
        for number in (1, 4)
    ]
    # One big batch, to the rounding of 3 steps in float32.
    np.testing.assert_allclose(*losses, rtol=1e-5)
