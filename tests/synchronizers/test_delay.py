"""Syncs that end some steps after they have begun."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from delayed_syncs import OUTER, asking, optimizer, run, stepping

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

AXIS, REPLICAS = helpers.AXIS, 2
# Sums of some dozens of float32 numbers of order one. Measured: 1e-6.
ATOL = 1e-5


@pytest.mark.parametrize("make", [stepping, asking])
def test_by_hand(make):
    """SGD of rate 1, gradients 1 and 3, half of the drift, a sync every 3 steps.

    After step 3 the replicas are at -3 and -9, and bring that; after step 5 they would
    be at -5 and -15. The mean drift is -6, so the anchor goes to -3, and the replicas
    to -3 - 2 and -3 - 6. After step 6 they are 3 and 9 from the anchor, and so on.
    """
    tx = optimizer(3, 2, optax.sgd(0.5))
    gradients = [{"a": np.float32([[1], [3]])}] * 8
    found = list(run(make, tx, gradients, {"a": jnp.zeros(1)}))
    assert [params["a"].ravel().tolist() for params, _ in found] == [
        *([-1, -3], [-2, -6], [-3, -9], [-4, -12], [-5, -9]),
        *([-6, -12], [-7, -15], [-8, -12]),
    ]
    anchors = [state.sync_state.anchor["a"].ravel().tolist() for _, state in found]
    assert anchors == [[0, 0]] * 4 + [[-3, -3]] * 3 + [[-6, -6]]
    counted = [state.metrics for _, state in found]
    assert [int(x.syncs[0]) for x in counted] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [int(x.synced[0]) for x in counted] == [0, 0, 1, 0, 0, 1, 0, 0]
    # What is sent is counted on the step that sends it: 4 bytes, and a weight.
    sent = [metrics.read(state)["bytes"] for _, state in found]
    flags = [4 * i if make is asking else 0 for i in range(1, 9)]
    assert [a - b for a, b in zip(sent, flags, strict=True)] == [0] * 4 + [8] * 3 + [16]
    # The model is that of the last sync that has ended.
    assert cd.replicas.consensus(*found[6])["a"].tolist() == [-3]
    assert cd.replicas.consensus(found[6][0])["a"].tolist() == [-11]


class Reference:
    """N replicas in float64: SGD with weight decay, Nesterov, fragments in turn."""

    def __init__(self, params, number, *, k, delay, fragments):
        self.params = [
            {n: np.float64(x) for n, x in params.items()} for _ in range(number)
        ]
        self.anchor = {n: np.float64(x) for n, x in params.items()}
        self.trace = {n: np.zeros_like(x) for n, x in self.anchor.items()}
        self.k, self.delay, self.fragments = k, delay, fragments
        self.under_way, self.steps, self.begun = None, 0, 0

    def step(self, gradients):
        for own, tree in zip(self.params, gradients, strict=True):
            for name, g in tree.items():
                own[name] = own[name] - 0.3 * (g + 0.1 * own[name])
        self.steps += 1
        if self.under_way and self.steps == self.under_way[0] + self.delay:
            self._end(*self.under_way[1:])
            self.under_way = None
        if self.steps % self.k == 0 and not self.under_way:
            then = [dict(own) for own in self.params]
            names = self.fragments[self.begun % len(self.fragments)]
            self.under_way = self.steps, names, then
            self.begun += 1

    def _end(self, names, then):
        for name in names:
            d = np.mean([self.anchor[name] - x[name] for x in then], axis=0)
            self.trace[name] = d + 0.6 * self.trace[name]
            self.anchor[name] -= 0.7 * (d + 0.6 * self.trace[name])
            for own, old in zip(self.params, then, strict=True):
                own[name] = self.anchor[name] + own[name] - old[name]


@pytest.mark.parametrize(
    ("k", "delay", "fragments"),
    [
        pytest.param(3, 1, 1, id="1 of 3"),
        pytest.param(3, 3, 1, id="as long as a period"),
        # What is due while a sync is under way is dropped.
        pytest.param(2, 3, 1, id="longer", marks=pytest.mark.slow),
        pytest.param(3, 2, 2, id="fragments"),
        pytest.param(1, 1, 2, id="always", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", [stepping, asking])
def test_replicas_are_those_of_the_reference(make, k, delay, fragments):
    inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3))
    tx = optimizer(k, delay, OUTER, inner, fragments=fragments)
    params = helpers.make_params()
    paths = synchronizers.fragment_paths(params, fragments)
    reference = Reference(params, REPLICAS, k=k, delay=delay, fragments=paths)
    gradients = helpers.make_gradients(11, REPLICAS)
    moved = helpers.make_params()
    for tree, (params, state) in zip(gradients, run(make, tx, gradients), strict=True):
        reference.step([{n: g[i] for n, g in tree.items()} for i in range(REPLICAS)])
        assert state.metrics.syncs.tolist() == [reference.begun] * REPLICAS
        for name in params:
            expected = np.stack([own[name] for own in reference.params])
            np.testing.assert_allclose(params[name], expected, rtol=0, atol=ATOL)
            anchor = state.sync_state.anchor[name]
            np.testing.assert_array_equal(anchor[0], anchor[1])
            np.testing.assert_allclose(
                anchor[0], reference.anchor[name], rtol=0, atol=ATOL
            )
    assert any(
        (anchor[0] != moved[n]).any() for n, anchor in state.sync_state[0].items()
    )


def test_without_a_delay_nothing_is_under_way():
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    ((_, state),) = run(stepping, optimizer(2, 0, OUTER), [gradients])
    assert state.sync_state.own == ()


def talking(step, *arguments, **options):
    """Equations over the replica axis."""
    return [
        x.primitive.name
        for x in helpers.equations(step.trace(*arguments, **options).jaxpr.jaxpr)
        if AXIS
        in jax.tree.leaves((x.params.get("axes", ()), x.params.get("axis_name", ())))
        and x.primitive.name not in ("axis_index", "pvary")
    ]


def test_nothing_crosses_where_a_sync_begins():
    tx = optimizer(3, 2)
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.replica_step(tx, mesh)
    assert not talking(step, state, batch, sync=False)
    assert not talking(step, state, batch, sync=True)
    assert talking(step, state, batch)  # the program that decides


@pytest.mark.parametrize("fragments", [1, 2])
def test_error_feedback_loses_nothing(fragments):
    """anchor + mean residual = start - sum of mean gradients until the sync began."""
    form = compressors.quantize(4, 4)
    inner = optax.sgd(0.1)
    tx = optimizer(2, 1, None, inner, compressor=form, fragments=fragments)
    gradients = helpers.make_gradients(7, 3)
    found = list(run(stepping, tx, gradients))
    _, state = found[-1]
    paths = synchronizers.fragment_paths(helpers.make_params(), fragments)
    for names, until in zip(paths, ([6] if fragments == 1 else [6, 4]), strict=True):
        for name in names:
            total = sum(tree[name].mean(0) for tree in gradients[:until])
            anchor = state.sync_state.anchor[name]
            residual = state.sync_state.residual[name]
            assert name == "bias" or residual.any()
            np.testing.assert_allclose(
                anchor[0] + residual.mean(0),
                helpers.make_params()[name] - 0.1 * total,
                rtol=0,
                atol=ATOL,
            )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: synchronizers.reconcile(delay=2), "Give momentum=False"),
        (lambda: synchronizers.reconcile(delay=-1), "delay must be at least 0, got -1"),
        (
            lambda: synchronizers.reconcile(delay=2, momentum=False, other_state=True),
            "other_state=False",
        ),
        (
            lambda: cd.adaptive_sync(
                optax.sgd(0.1),
                triggers.drift(0.1),
                synchronizers.reconcile(delay=2, momentum=False),
                AXIS,
            ),
            "a trigger that looks at counters alone, such as triggers.evenly",
        ),
        (
            lambda: cd.adaptive_sync(
                optax.sgd(0.1),
                triggers.every_k(5),
                synchronizers.reconcile(delay=2, momentum=False),
                AXIS,
                ask_every=5,
            ),
            "got ask_every: 5",
        ),
        (
            lambda: cd.adaptive_sync(
                optax.sgd(0.1),
                triggers.every_k(5),
                synchronizers.average_gradients()._replace(delay=2),
                AXIS,
            ),
            "it needs after_local_step=True",
        ),
        (lambda: one_update(optimizer(3, 2), sync=True), "got sync: True"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_synchronizer_of_ones_own_has_room_for_what_is_noted():
    params = {"w": jnp.ones(2)}
    for own in ((), synchronizers.Measured.initial(params)):
        kept = synchronizers.SyncState(anchor=params, own=own)
        mine = synchronizers.Synchronizer(
            init=lambda params, inner_state, views, kept=kept: kept,
            sync=lambda local, state, group: (*local.take(), state),
            payload=lambda *_: compressors.Payload(),
            after_local_step=True,
            delay=2,
        )
        tx = cd.adaptive_sync(optax.sgd(0.1), triggers.every_k(3), mine)
        if own:
            assert one_update(tx)[1].metrics.syncs == 0
        else:
            with pytest.raises(TypeError, match=r"Measured.initial\(params\)"):
                tx.init(params)


def one_update(tx, **options):
    params = {"w": jnp.ones(2)}
    return tx.update(params, tx.init(params), params, **options)


def test_one_replica_keeps_its_outer_step():
    """axis_name=None: the anchor takes outer steps, as late as with others."""
    tx = cd.adaptive_sync(
        optax.sgd(1.0),
        triggers.every_k(2),
        synchronizers.reconcile(optax.sgd(0.5), momentum=False, delay=1),
    )
    params = {"w": jnp.zeros(1)}
    state, found = tx.init(params), []
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones(1)}, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(params["w"][0]))
    assert found == [-1, -2, -2, -3]
