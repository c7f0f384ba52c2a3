"""The NumPy reference of Dion against microsoft/dion's own update."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference as ref

# dion_update casts to float32 inside its QR and its column normalisation. P and Q then
# carry 2^-24 = 6e-8 times the condition number of B Q, up to 1.8e3 in these cases; one
# step and five steps in a row differ by at most 2.1e-6 in X, 4.0e-7 in M, 2.6e-5 in Q.
# With float64 in place of float32 in that file: 2e-15, 9e-16, 3e-14.
MICROSOFT_ATOL = {"X": 5e-6, "M": 1e-6, "Q": 6e-5}
# Two float64 evaluations of one product.
EQUIVALENT_ATOL = 1e-12

with np.load(
    Path(__file__).parents[1] / "support" / "vectors" / "microsoft_dion.npz"
) as _file:
    VECTORS = dict(_file)
PROVENANCE = json.loads(str(VECTORS["provenance"]))


def close(actual, expected, atol):
    """Assert that two arrays agree to an absolute tolerance."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_vectors_say_where_they_come_from():
    assert PROVENANCE["source"] == "https://github.com/microsoft/dion"
    assert len(PROVENANCE["commit"]) == 40
    assert {"torch", "date", "licence", "settings"} <= PROVENANCE.keys()
    stored = {key.rsplit("/")[0] for key in VECTORS if key != "provenance"}
    assert stored == PROVENANCE["cases"].keys()


def microsoft_states(name):
    """Steps' (X, M, Q) and gradients in Flax's layout: X, M and G transposed."""
    x, m, q, g = (VECTORS[f"{name}/{key}"] for key in "XMQG")
    states = list(zip(x.swapaxes(1, 2), m.swapaxes(1, 2), q, strict=True))
    return states, g.swapaxes(1, 2)


def reference_update(state, gradient, weight_decay):
    """X' = X - lr wd X - lr D, with M' and Q'."""
    x, m, q = state
    mu, lr = PROVENANCE["settings"]["mu"], PROVENANCE["settings"]["learning_rate"]
    direction, m, q = ref.dion_step(gradient, m, q, mu=mu)
    return x - lr * weight_decay * x - lr * direction, m, q


def unit_columns(q, like):
    """Columns of norm one, with the signs that bring them closest to ``like``."""
    return q / np.linalg.norm(q, axis=0) * np.sign((q * like).sum(axis=0))


@pytest.mark.parametrize("in_a_row", [False, True], ids=["one-step", "five-steps"])
@pytest.mark.parametrize("name", PROVENANCE["cases"])
def test_reference_reproduces_microsoft_dion(name, in_a_row):
    decay = PROVENANCE["cases"][name]["weight_decay"]
    states, gradients = microsoft_states(name)
    own = states[0]
    for before, after, gradient in zip(states, states[1:], gradients, strict=False):
        own = reference_update(own if in_a_row else before, gradient, decay)
        close(own[0], after[0], MICROSOFT_ATOL["X"])
        close(own[1], after[1], MICROSOFT_ATOL["M"])
        # Q is determined up to the signs of its columns. Their lengths differ only
        # after an all-zero momentum, see the next test.
        close(unit_columns(own[2], after[2]), after[2], MICROSOFT_ATOL["Q"])


@pytest.mark.parametrize("name", [n for n in PROVENANCE["cases"] if "zero_first" in n])
def test_all_zero_step_keeps_q_where_microsoft_dion_normalises_it(name):
    (first, second, *_), gradients = microsoft_states(name)
    _, _, q = reference_update(first, gradients[0], 0.1)
    assert not gradients[0].any()
    close(q, first[2], 0)
    close(second[2], unit_columns(first[2], first[2]), MICROSOFT_ATOL["Q"])
    close(second[0], first[0] * (1 - 0.1 * 0.1), EQUIVALENT_ATOL)  # weight decay alone
