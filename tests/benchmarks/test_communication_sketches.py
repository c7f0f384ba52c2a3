"""Ideas without a part of the library: what is exchanged, and what is counted of it."""

import json

import data
import exchanges
import jax
import jax.numpy as jnp
import lengths
import numpy as np
import pytest
import sizes
import sketches

# Means of a few float32 numbers of order 1 against float64.
RTOL = 1e-6
PARAMS = {
    "blocks": {"attention": {"key": jnp.ones((2, 3))}, "up": jnp.ones((3, 4))},
    "head": jnp.ones(6),
}


def apart(replicas, seed=0):
    """Replicas at random places, whose anchor and outer momentum are random too."""
    random = np.random.default_rng(seed)
    each = lambda *lead: jax.tree.map(  # noqa: E731
        lambda x: jnp.asarray(random.normal(size=(*lead, *x.shape)), jnp.float32),
        PARAMS,
    )
    return exchanges.Replicas(each(replicas), (), each(), each())


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def exchanged(sketch, numbers, replicas=None):
    """After the exchanges of these steps, with what counted them."""
    replicas = apart(sketch.replicas) if replicas is None else replicas
    exchange = exchanges.Exchange(sketch, PARAMS)
    for number in numbers:
        replicas = exchange(replicas, number)
    return replicas, exchange


def test_a_sync_of_everything_is_a_nesterov_step_by_the_mean():
    before = apart(4)
    sketch = sketches.LOCAL.but(replicas=4, every=2)
    after, exchange = exchanged(sketch, [1, 2])
    assert (exchange.sent, exchange.syncs) == (1.0, [1])
    given = zip(*(leaves(x) for x in (before[0], *before[2:])), strict=True)
    for (x, anchor, velocity), new in zip(given, leaves(after.params), strict=True):
        drift = x.mean(0) - anchor
        velocity = 0.4 * velocity + drift
        expected = anchor + drift + 0.4 * velocity
        np.testing.assert_allclose(new, [expected] * 4, RTOL, RTOL)


def test_nothing_moves_between_syncs():
    before = apart(8)
    after, exchange = exchanged(sketches.LOCAL, range(1, 7))
    assert (exchange.sent, exchange.syncs) == (0.0, [0])
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(
    ("partners", "number", "pairs", "sent"),
    [
        ("fixed", 1, [(0, 1), (2, 3)], 0.0),
        ("fixed", 2, [(0, 1), (2, 3)], 0.0),
        # Each gives what it has once; of an all-reduce over four it is 2 x 3 / 4.
        ("changing", 1, [(0, 1), (2, 3)], 2 / 3),
        ("changing", 2, [(0, 2), (1, 3)], 2 / 3),
    ],
)
def test_pairs_are_averaged(partners, number, pairs, sent):
    sketch = sketches.LOCAL.but(replicas=4, every=0, pairs=1, partners=partners)
    before = apart(4)
    after, exchange = exchanged(sketch, [number])
    assert exchange.sent == pytest.approx(sent)
    for old, new in zip(leaves(before.params), leaves(after.params), strict=True):
        for pair in pairs:
            mean = old[list(pair)].mean(0)
            np.testing.assert_allclose(new[list(pair)], [mean] * 2, RTOL, RTOL)
    jax.tree.map(np.testing.assert_array_equal, before.anchor, after.anchor)


def test_a_fragment_comes_together_and_the_others_stay():
    # 6, 12 and 6 elements: a quarter, a half and a quarter of the bytes.
    sketch = sketches.LOCAL.but(fragments="in turn", every=4)
    before = apart(8)
    after, exchange = exchanged(sketch, [1], before)
    assert (exchange.sent, exchange.syncs) == (0.25, [1, 0, 0])
    moved = [
        not np.array_equal(x, y)
        for x, y in zip(leaves(before.params), leaves(after.params), strict=True)
    ]
    assert moved == [True, False, False]
    _, exchange = exchanged(sketch, range(1, 9))
    assert (exchange.sent, exchange.syncs) == (2.0, [2, 2, 2])


@pytest.mark.parametrize("signal", ["drift", "divergence"])
def test_the_fragment_of_the_largest_signal_is_chosen(signal):
    before = apart(8)
    params = before.params | {"head": before.params["head"] * 100}
    # Further away, and alike on all replicas.
    key = jnp.full((8, 2, 3), 1e4)
    params["blocks"] = params["blocks"] | {"attention": {"key": key}}
    before = before._replace(params=params)
    sketch = sketches.LOCAL.but(fragments=signal, every=4)
    _, exchange = exchanged(sketch, [1], before)
    assert exchange.syncs == ([1, 0, 0] if signal == "drift" else [0, 0, 1])
    found = exchanges.signals(exchange.parts, before.params, before.anchor)
    for part, name in enumerate(("key", "up", "head")):
        tree = {**before.params["blocks"]["attention"], **before.params["blocks"]}
        anchors = {**before.anchor["blocks"]["attention"], **before.anchor["blocks"]}
        x = np.float64((tree | {"head": before.params["head"]})[name])
        anchor = np.float64((anchors | {"head": before.anchor["head"]})[name])
        size = np.sqrt(8 * np.sum(anchor**2))
        drift = np.sqrt(np.sum((x - anchor) ** 2)) / size
        divergence = np.sqrt(np.sum((x - x.mean(0)) ** 2)) / size
        expected = {"drift": drift, "divergence": divergence}
        for key, value in expected.items():
            np.testing.assert_allclose(found[key][part], value, 10 * RTOL)


def test_two_momenta_by_hand():
    tx = exchanges.two_momenta(lambda count: 0.5, share=0.25)
    state = tx.init(jnp.zeros(()))
    fast = slow = 0.0
    for count, gradient in enumerate((1.0, 3.0), start=1):
        update, state = tx.update(jnp.asarray(gradient), state)
        fast = 0.5 * fast + 0.5 * gradient
        slow = 0.98 * slow + 0.02 * gradient
        ahead = 0.5 * fast / (1 - 0.5**count) + 0.5 * gradient
        expected = 0.75 * ahead + 0.25 * slow / (1 - 0.98**count)
        np.testing.assert_allclose(update, expected, 10 * RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("label", sketches.IDEAS)
def test_every_idea_trains(label):
    sketch = sketches.IDEAS[label].sketch.but(steps=2, replicas=4, every=1)
    row = exchanges.train(sketch, sizes.SIZES["test"], data.load(None))
    assert np.isfinite(row["loss"])
    assert json.dumps(row)  # a line of the results


def test_the_page_is_made_of_the_results():
    rows = sketches.read(sketches.RESULTS / "rows.jsonl")
    page = (sketches.RESULTS / "table.md").read_text()
    assert page == sketches.document(rows)


def test_how_long_a_run_is_that_ends_at_a_loss():
    ends = {300: 1.6, 1200: 1.4, 4800: 1.3}
    assert lengths.steps_to(1.6, ends) is None
    assert lengths.steps_to(1.2, ends) is None
    assert lengths.steps_to(1.4, ends) == pytest.approx(1200)
    middle = lengths.steps_to(np.sqrt(1.6 * 1.4), ends)
    assert middle == pytest.approx(600)
