"""Random configurations in float64 are the NumPy reference's, fault by fault.

Of `local_muon`, `curvadion` and Dion, with 2 to 7 replicas, exact or in 8 to 1 bits.
Replicas have weights, are absent, all of them too, and have gradients and momenta that
are not finite.
"""

from typing import Any, NamedTuple

import helpers
import jax
import numpy as np
import optax
import pytest
import reference_replicas as reference

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

STEPS, RATE = 14, 0.05
SHAPES = {
    "bias": (5,),
    "embed": (9, 7),
    "stack": (2, 6, 4),
    "tall": (10, 4),
    "wide": (4, 6),
}
MATRICES = ("stack", "tall", "wide")
NUMBERS = {
    name: cd.DimensionNumbers(len(shape) - 2, len(shape) - 1)
    if name in MATRICES
    else None
    for name, shape in SHAPES.items()
}
# Scales of codes and weights are float32, and five Newton-Schulz iterations multiply a
# difference in a small singular value by up to 3.4**5. Measured: 5e-6 in one element
# of seeds 11 and 27, below 3e-6 otherwise, and 1e-15 where weights are equal and
# nothing is encoded.
ATOL = 1e-5


class Configuration(NamedTuple):
    """How to make an optimizer of a mesh, its twin, and what happens to it."""

    make: Any
    inner: Any
    trigger: Any
    sync: Any
    replicas: int
    weights: Any  # [steps, replicas]
    gradients: list
    spoilt: bool  # the last replica's momentum, before a step


def configuration(seed: int, params: Any) -> Configuration:
    rng = np.random.default_rng(seed)
    method = ("local_muon", "curvadion", "factors", "gradients")[seed % 4]
    replicas, bits = (2, 3, 5, 7)[seed // 4 % 4], (2, 1, 4, 8, None)[seed % 5]
    block = int(rng.choice([8, 16, 64]))
    mu, decay = float(rng.choice([0.8, 0.9])), float(rng.choice([0.0, 0.1]))
    options = {"weight_decay": decay, "adam_learning_rate": RATE / 2}
    options |= {"dimension_numbers": NUMBERS, "momentum": mu}
    compressor = bits and compressors.quantize(bits, block)

    if method in ("local_muon", "curvadion"):
        outer = float(rng.choice([1.0, 0.7])), float(rng.choice([0.4, 0.8]))
        synchronizer = synchronizers.reconcile(
            optax.sgd(*outer, nesterov=True), compressor=compressor
        )
        sync = reference.Reconcile(reference.Nesterov(*outer), bits, block)
    elif method == "gradients":
        synchronizer = synchronizers.average_gradients(compressor)
        sync = reference.AverageGradients(bits, block)
    else:
        synchronizer = synchronizers.average_factors(NUMBERS)
        sync = reference.AverageFactors()

    uses_muon = method in ("local_muon", "gradients")
    rank = 1.0 if uses_muon else (1, 2, 0.7, 1.0)[seed // 4 % 4]
    cost = 1.0 if method == "factors" else reference.cost_of(params, sync, replicas)
    # A share of the steps, and no budget of which `curvadion` would warn.
    budget = min(float(rng.uniform(0.2, 0.6)) * cost, 0.49)
    share = budget / cost
    if uses_muon and seed % 8 < 4:
        when: Any = {"budget": budget}
        trigger: Any = reference.Evenly(share)
    elif uses_muon or (method == "factors" and seed % 8 < 4):
        when, trigger = {"trigger": triggers.every_k(3)}, reference.every_k(3)
    elif method == "curvadion" and seed % 8 < 4:
        when, trigger = {"budget": budget}, reference.MomentumChange(0.1, share)
    else:
        limit = float(rng.uniform(0.4, 0.7))
        when, trigger = {"threshold": limit}, reference.MomentumChange(limit)

    adamw = reference.AdamW(RATE / 2, nesterov=uses_muon)
    if uses_muon:
        make = lambda mesh: cd.local_muon(
            RATE, synchronizer=synchronizer, mesh=mesh, **when, **options
        )
    elif method == "curvadion":
        make = lambda mesh: cd.curvadion(
            RATE, rank=rank, synchronizer=synchronizer, mesh=mesh, **when, **options
        )
    else:
        limit = when.get("threshold")
        change = limit and triggers.relative_momentum_change(limit, NUMBERS)
        make = lambda mesh: cd.adaptive_sync(
            cd.dion(RATE, rank=rank, **options),
            change or when["trigger"],
            synchronizer,
            mesh,
        )
    qs = None if uses_muon else first_qs(rank, params)
    inner = reference.Matrices(MATRICES, RATE, mu, adamw, decay, qs)

    scales = rng.choice([1.0, 1.0, 1.0, 3.0], size=STEPS)
    gradients = [
        {name: scale * rng.normal(size=(replicas, *s)) for name, s in SHAPES.items()}
        for scale in scales
    ]
    weights = np.ones((STEPS, replicas), np.float32)
    if rng.random() < 0.6:
        # No integers: AdamW's first steps are of one size, and means of those would lie
        # right between two codes.
        weights = rng.uniform(0.5, 3.0, (STEPS, replicas)).astype(np.float32)
        weights[rng.random(weights.shape) < 0.3] = 0
        weights[5:8] = 0  # nobody
    if rng.random() < 0.6:
        gradients[0]["bias"][1, 2] = np.inf
        gradients[7]["tall"][0, 1, 1] = gradients[9]["embed"][1, 1] = np.nan
    spoilt = bool(rng.random() < 0.4)
    return Configuration(
        make, inner, trigger, sync, replicas, weights, gradients, spoilt
    )


def first_qs(rank, params):
    state = cd.scale_by_dion(
        rank, dimension_numbers=lambda p: {n: NUMBERS[n] for n in p}
    ).init({n: params[n] for n in MATRICES})
    return {n: np.asarray(q) for n, q in state.dion_q.items()}


SPOILT_STEP = 3


def spoil(step, state):
    """A NaN in the momentum of the last replica's tall matrix."""
    if step == SPOILT_STEP:
        for path, x in jax.tree.leaves_with_path(state[1].rows.inner_state):
            place = jax.tree_util.keystr(path)
            if place.endswith((".momentum['tall']", ".mu['tall']")):
                x[-1, 0, 0] = np.nan
    return state


# With all faults: gradients of seven replicas in two bits, `local_muon`, and factors.
QUICK = (15, 16, 18)


@pytest.mark.parametrize("seed", helpers.slow_but(QUICK, range(30)))
def test_a_random_configuration_is_the_reference(seed):
    rng = np.random.default_rng(1000 + seed)
    with jax.enable_x64(True):
        params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
        case = configuration(seed, params)
        run = reference.Run(params, case.inner, case.replicas, case.trigger, case.sync)
        trajectory = helpers.run_simulated(
            case.make,
            params,
            case.gradients,
            change=spoil if case.spoilt else None,
            weight=list(case.weights),
        )
        for step, (found, state) in enumerate(trajectory):
            if case.spoilt and step == SPOILT_STEP:
                run.states[-1]["momentum"]["tall"][0, 0] = np.nan
            gradients = reference.rows_of(case.gradients[step], case.replicas)
            run.step(gradients, case.weights[step])
            assert (int(state.counters.since) == 0) == run.synced[-1], step
            for name, x in found.items():
                expected = np.stack([row[name] for row in run.params])
                np.testing.assert_allclose(
                    x, expected, 0, ATOL, err_msg=f"{step} {name}"
                )
    assert 2 <= sum(run.synced) < STEPS
    for name in SHAPES:
        residual = state.rows.residual and state.rows.residual[name]
        if len(residual):
            expected = np.stack([row[name] for row in run.residuals])
            np.testing.assert_allclose(residual, expected, rtol=0, atol=ATOL)
        if state.common.anchor:
            anchor = state.common.anchor[name]
            np.testing.assert_allclose(anchor, run.anchor[name], rtol=0, atol=ATOL)
