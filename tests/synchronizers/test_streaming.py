"""`reconcile` in parts: fragments that come together in turn, momentum now and then."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

pytestmark = pytest.mark.slow

AXIS = helpers.AXIS
# Sums of some dozens of float32 numbers of order one. Measured: 2e-6.
ATOL = 2e-5
# Elements of fragments of the helpers' parameters: tall 24, wide 24, embed 21, bias 5.
TWO = [["tall", "embed"], ["wide", "bias"]]


def optimizer(inner=None, k=1, outer=None, **options) -> Any:
    inner = optax.sgd(1.0) if inner is None else inner
    return cd.adaptive_sync(
        inner, triggers.every_k(k), synchronizers.reconcile(outer, **options), AXIS
    )


def same_on_all(array) -> bool:
    return len({row.tobytes() for row in np.asarray(array)}) == 1


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL)


def test_two_fragments_by_hand():
    """Two replicas, SGD of rate 1, outer step of half the drift, a sync every step.

    a has gradients (1, 1) and (3, 5), b 2 and 4; both start at 0. Step 1 brings a
    together: drifts (-1, -1) and (-3, -5), half their mean (-1, -1.5). b stands at -2
    and -4. Step 2 brings b: drifts -4 and -8, half their mean -3; a moved on alone.
    Step 3 brings a: from the anchor (-1, -1.5) drifts (-2, -2), (-6, -10), half their
    mean (-2, -3), so (-3, -4.5); b is at -3 - 2 and -3 - 4.
    """
    tx = optimizer(outer=optax.sgd(0.5), fragments=2, momentum=False)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = {
        "a": np.float32([[1, 1], [3, 5]]),
        "b": np.float32([[2], [4]]),
    }
    history = list(helpers.run_mesh(tx, params, [gradients] * 3))
    got = [(p["a"].tolist(), p["b"].tolist()) for p, _ in history]
    assert got == [
        ([[-1, -1.5]] * 2, [[-2], [-4]]),
        ([[-2, -2.5], [-4, -6.5]], [[-3]] * 2),
        ([[-3, -4.5]] * 2, [[-5], [-7]]),
    ]
    anchors = [state.sync_state.anchor for _, state in history]
    assert [(x["a"].tolist(), x["b"].tolist()) for x in anchors] == [
        ([[-1, -1.5]] * 2, [[0]] * 2),
        ([[-1, -1.5]] * 2, [[-3]] * 2),
        ([[-3, -4.5]] * 2, [[-3]] * 2),
    ]
    model = cd.replicas.consensus(*history[2])
    assert (model["a"].tolist(), model["b"].tolist()) == ([-3, -4.5], [-3])
    assert metrics.read(history[2][1])["bytes"] == 4 * (2 + 1 + 2) + 3 * (4 + 4)


def test_momentum_at_every_third_sync_by_hand():
    # Rate 0, decay 1/2: after steps 1 to 3 the trace of gradient g is g, 3/2 g, 7/4 g;
    # g is 1 and 3, so that the third sync leaves 7/2 on both; then 7/4 + g.
    tx = optimizer(optax.sgd(0.0, 0.5), momentum_every=3)
    gradients = [{"w": np.float32([[1], [3]])}] * 4
    history = helpers.run_mesh(tx, {"w": jnp.zeros(1)}, gradients)
    traces = [state.inner_state[0].trace["w"][:, 0].tolist() for _, state in history]
    assert traces == [[1, 3], [1.5, 4.5], [3.5, 3.5], [2.75, 4.75]]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(compressors.quantize(4, 4), id="int4"),
    ],
)
def test_error_feedback_of_fragments_loses_nothing(form):
    """anchor + mean residual = start - sum of mean gradients, as of the last turn."""
    tx = optimizer(optax.sgd(0.1), compressor=form, fragments=2, momentum=False)
    gradients = helpers.make_gradients(5, 3)
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    _, state = history[-1]
    for names, steps in zip(TWO, (5, 4), strict=True):  # turns at steps 1, 3, 5; 2, 4
        for name in names:
            total = sum(tree[name].mean(0) for tree in gradients[:steps])
            anchor = state.sync_state.anchor[name]
            residual = state.sync_state.residual[name]
            assert same_on_all(anchor)
            assert name == "bias" or residual.any()
            expected = helpers.make_params()[name] - 0.1 * total
            close(anchor[0] + residual.mean(0), expected)


def test_a_compressed_momentum_in_fragments():
    """Means are kept, and only the momenta of a fragment move at its turn."""
    inner = optax.sgd(0.0, 0.5)
    gradients = helpers.make_gradients(2, 3)
    runs = [
        list(helpers.run_vmap(optimizer(inner, **options), params, gradients))
        for params in [helpers.make_params()]
        for options in (
            {"momentum": False},
            {"momentum": compressors.quantize(4, 4), "fragments": 2},
        )
    ]
    for step, (names, others) in enumerate((TWO, TWO[::-1])):
        alone, shared = (run[step][1].inner_state[0].trace for run in runs)
        for name in names:
            close(shared[name].mean(0), alone[name].mean(0))
            assert shared[name].std(0).mean() < alone[name].std(0).mean()
        for name in others if step == 0 else ():
            helpers.assert_bitwise(shared[name], alone[name])


def test_other_state_takes_turns_too():
    tx = optimizer(optax.adamw(0.01), fragments=2, momentum_every=2, other_state=True)
    gradients = helpers.make_gradients(4, 3)
    history = list(helpers.run_mesh(tx, helpers.make_params(), gradients))
    for step, (params, state) in enumerate(history):
        turn, with_state = TWO[step % 2], step >= 2
        adam = state.inner_state[0]
        for name in helpers.SHAPES:
            common = name in turn
            assert same_on_all(state.sync_state.anchor[name])
            assert (np.std(params[name], 0).max() < ATOL) == common
            for moments in (adam.mu, adam.nu):
                assert same_on_all(moments[name]) == (common and with_state)


def test_an_outer_schedule_counts_a_fragments_own_turns():
    outer = optax.sgd(optax.exponential_decay(1.0, 1, 0.5))
    tx = optimizer(outer=outer, momentum=False, fragments=2)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = jax.tree.map(lambda x: np.ones((2, *x.shape), np.float32), params)
    history = list(helpers.run_vmap(tx, params, [gradients] * 4))
    # a: -1 at step 1, half of -2 at step 3. b: -2 at step 2, half of -2 at step 4.
    anchor = history[-1][1].sync_state.anchor
    assert anchor["a"].tolist() == [[-2, -2]] * 2
    assert anchor["b"].tolist() == [[-3]] * 2
