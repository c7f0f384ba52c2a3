"""scale_by_dion against the NumPy reference: ranks, layouts, stacks, momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from dion_runs import (
    MU,
    NUMBERS,
    SHAPES,
    close,
    compiled,
    normal,
    random_state,
    rank_of,
    run,
    same_columns,
    zeros,
)

import curvadion_jax as cd

STEPS = 10
# Both in float64 from the same Q, ten steps: measured 1.1e-13, at full rank, where the
# condition number of B Q is largest.
FLOAT64_ATOL = 1e-12
# One step in float32 from the same state: measured 5.4e-7 in numbers of order one.
FLOAT32_ATOL = 3e-6
# epsilon = 1e-8 in the column norms of R, which are above 1e-3 here: measured 3.2e-6.
SIZE_ATOL = 2e-5


def reference_run(gradients, q, **settings):
    """Directions, momenta and right factors of all steps."""
    momentum, results = np.zeros_like(gradients[0]), []
    for gradient in gradients:
        results.append(ref.dion_step(gradient, momentum, q, **settings))
        _, momentum, q = results[-1]
    return [np.stack(each) for each in zip(*results, strict=True)]


def q_shapes(rank):
    return {name: (min(shape), rank_of(shape, rank)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("rank", "error_feedback"),
    [
        pytest.param(1, True, id="rank1", marks=pytest.mark.slow),
        pytest.param(0.75, True, id="all-but-one"),  # 4 of 5
        pytest.param(1.0, True, id="full", marks=pytest.mark.slow),
        pytest.param(0.3, False, id="paper-momentum", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_in_float64(rank, error_feedback):
    gradients, params = normal(SHAPES, STEPS), zeros(SHAPES)
    tx = cd.scale_by_dion(
        rank, MU, dimension_numbers=NUMBERS, error_feedback=error_feedback
    )
    first = random_state(params, q_shapes(rank))
    with jax.enable_x64(True):
        updates, states = run(tx, params, gradients, first)
    for name in SHAPES:
        assert states.dion_q[name].dtype == np.float64
        direction, momentum, q = reference_run(
            gradients[name], first.dion_q[name], mu=MU, error_feedback=error_feedback
        )
        close(updates[name], direction, FLOAT64_ATOL, name)
        close(states.momentum[name], momentum, FLOAT64_ATOL, name)
        same_columns(states.dion_q[name], q, FLOAT64_ATOL, name)


def test_each_step_in_float32():
    """From the state the library itself had: rounding does not accumulate."""
    gradients = normal(SHAPES, STEPS, seed=1, dtype=np.float32)
    state = random_state(zeros(SHAPES, np.float32), q_shapes(3))
    for t in range(STEPS):
        gradient = {name: gradients[name][t] for name in SHAPES}
        updates, new_state = compiled(3)(gradient, state)
        for name in SHAPES:
            assert updates[name].dtype == jnp.float32
            before = [np.asarray(x[name], np.float64) for x in (gradient, *state[:2])]
            direction, momentum, q = ref.dion_step(*before, mu=MU)
            close(updates[name], direction, FLOAT32_ATOL, (name, t))
            close(new_state.momentum[name], momentum, FLOAT32_ATOL, (name, t))
            same_columns(new_state.dion_q[name], q, FLOAT32_ATOL, (name, t))
        state = new_state


# Every leaf is made of kernels (6, 8) or (8, 6). The factors of all of them have equal
# shapes and are orthonormalised as one stack. name: shape, dimension numbers, shape of
# Q, and the index or reshaping that gives each kernel.
LAYOUTS = {
    "wide": ((6, 8), (0, 1), (6, 3), [np.s_[:]]),
    "middle": ((8, 2, 6), (0, 2), (2, 6, 3), [np.s_[:, i] for i in range(2)]),
    "around": (
        (2, 6, 8, 3),
        (1, 2),
        (2, 3, 6, 3),
        [np.s_[i, :, :, j] for i in range(2) for j in range(3)],
    ),
    "query": ((6, 2, 4), (0, (1, 2)), (6, 3), [(6, 8)]),
    "out": ((2, 4, 6), ((0, 1), 2), (6, 3), [(8, 6)]),
}


def kernel(x, part):
    """The 2-D kernel that a part of a leaf is."""
    if isinstance(part, tuple) and all(isinstance(n, int) for n in part):
        return x.reshape(part)
    return x[part]


@pytest.mark.slow
def test_layouts_equal_the_plain_kernel():
    """Stacks, batch axes anywhere, heads, and leaves of one shape, as if alone."""
    shapes = {name: layout[0] for name, layout in LAYOUTS.items()}
    numbers = {name: cd.DimensionNumbers(*x[1]) for name, x in LAYOUTS.items()}
    gradients, params = normal(shapes, 3, seed=2), zeros(shapes)
    first = random_state(params, {name: x[2] for name, x in LAYOUTS.items()})
    tx = cd.scale_by_dion(0.5, MU, dimension_numbers=numbers)
    with jax.enable_x64(True):
        updates, states = run(tx, params, gradients, first)
    for name, (_, _, q_shape, parts) in LAYOUTS.items():
        for i, part in enumerate(parts):
            gradient = [kernel(g, part) for g in gradients[name]]
            q = first.dion_q[name].reshape(-1, *q_shape[-2:])[i]
            direction, momentum, q = reference_run(gradient, q, mu=MU)
            for t in range(3):
                got = kernel(np.asarray(updates[name][t]), part)
                close(got, direction[t], FLOAT64_ATOL, (name, i, t))
            got = kernel(np.asarray(states.momentum[name][-1]), part)
            close(got, momentum[-1], FLOAT64_ATOL, (name, i))
            got = np.asarray(states.dion_q[name][-1]).reshape(-1, *q_shape[-2:])[i]
            same_columns(got, q[-1], FLOAT64_ATOL, (name, i))


def test_update_does_not_depend_on_the_size_of_the_gradients():
    gradients = normal(SHAPES, 1, seed=3, dtype=np.float32)
    gradients = {name: g[0] for name, g in gradients.items()}
    first = random_state(gradients, q_shapes(3))
    updates, _ = compiled(3)(gradients, first)
    for scale in (2.0**-10, 2.0**80):
        scaled = {name: np.float32(scale) * g for name, g in gradients.items()}
        new_updates, new_state = compiled(3)(scaled, first)
        for name in SHAPES:
            close(new_updates[name], updates[name], SIZE_ATOL, (name, scale))
            assert np.isfinite(new_state.momentum[name]).all()
