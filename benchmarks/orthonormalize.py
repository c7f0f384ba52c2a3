"""Accuracy and speed of ways to an orthonormal basis, in float32.

    taskset -c 0 python benchmarks/orthonormalize.py

* `cholesky_qr`, the library's: four passes, all but the last of them shifted.
* Householder QR.
* Randomised Cholesky QR, as in microsoft/dion: the triangle of a Householder QR of a
  random sketch of 1.25 times as many rows as columns, rounded up to a multiple of 128,
  and a plain pass of Cholesky QR. A square matrix has no room for a sketch: there,
  as in microsoft/dion, it is Householder QR.

Columns of random matrices with singular values from 1 down to 1 / condition, evenly
spaced on a logarithmic scale. The error is the largest element of |P^T P - I|. The span
error is the largest part of a column of the input outside the span of P, in units of
its length. Both are the worst over matrices, in float64; `nan` is worse than all.
"""

import functools
import math

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from jax import lax

import curvadion_jax as cd

OURS = "`cholesky_qr`"


def randomised_cholesky_qr(a: jax.Array) -> jax.Array:
    """`orthogonalize` of microsoft/dion's dion_reference.py, "rcqr"."""
    rows, cols = a.shape
    if rows <= cols:
        return jnp.linalg.qr(a)[0]
    matmul = functools.partial(jnp.matmul, precision="highest")
    size = 128 * math.ceil(1.25 * cols / 128)
    sketch = jax.random.normal(jax.random.key(0), (size, rows)) / math.sqrt(size)
    triangle = jnp.linalg.qr(matmul(sketch, a), mode="r")
    divide = functools.partial(lax.linalg.triangular_solve, left_side=False)
    a = divide(triangle, a)
    lower = jnp.linalg.cholesky(matmul(a.T, a), symmetrize_input=False)
    return divide(lower, a, lower=True, transpose_a=True)


METHODS = {
    OURS: jax.jit(cd.cholesky_qr),
    "Householder QR": jax.jit(lambda a: jnp.linalg.qr(a)[0]),
    "randomised Cholesky QR": jax.jit(randomised_cholesky_qr),
}


def matrix(rows: int, cols: int, condition: float, seed: int) -> np.ndarray:
    """A float32 matrix with a given condition number, made in float64."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(rows, cols)))[0]
    right = np.linalg.qr(rng.normal(size=(cols, cols)))[0]
    values = np.logspace(0, -np.log10(condition), cols)
    return np.asarray(left * values @ right, np.float32)


def errors(a: np.ndarray, basis: jax.Array) -> tuple[float, float]:
    """Error and span error, computed in float64."""
    p, a = np.asarray(basis, np.float64), np.asarray(a, np.float64)
    if not np.isfinite(p).all():
        return math.nan, math.nan
    error = np.abs(p.T @ p - np.eye(p.shape[1])).max()
    # The columns of P need not be orthonormal to span the right space; zeros span none.
    space = np.linalg.qr(p[:, p.any(axis=0)])[0]
    outside = a - space @ (space.T @ a)
    span = np.linalg.norm(outside, axis=0) / np.linalg.norm(a, axis=0)
    return float(error), float(span.max())


def _worst(values: list[float]) -> str:
    return "nan" if any(map(math.isnan, values)) else f"{max(values):.0e}"


def table(rows: int, cols: int, options) -> None:
    """Prints the table of a shape."""
    inputs = {
        condition: [matrix(rows, cols, condition, x) for x in range(options.seeds)]
        for condition in options.conditions
    }
    x = jnp.asarray(inputs[options.conditions[0]][0])
    turns = {
        name: lambda method=method: lambda: method(x).block_until_ready()
        for name, method in METHODS.items()
    }
    rounds = measuring.take_turns(turns, options.rounds, options.calls, warmup=1)
    ours = 1e3 * measuring.seconds(rounds, OURS)
    print(f"\n{rows} x {cols}; {OURS} takes {ours:.3g} ms\n")

    def lines():
        for name, method in METHODS.items():
            found = [[errors(a, method(a)) for a in x] for x in inputs.values()]
            spans = [span for each in found for _, span in each]
            worst = (_worst([error for error, _ in each]) for each in found)
            yield name, measuring.ratio(rounds, name, OURS), *worst, _worst(spans)

    conditions = (f"error, {condition:.0e}" for condition in options.conditions)
    measuring.table(["method", "time", *conditions, "span error"], lines())


def main() -> None:
    parser = measuring.parser(__doc__)
    shapes = ["384x96", "768x192", "3072x192", "768x768"]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="ROWSxCOLUMNS")
    conditions = [1.0, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12]
    parser.add_argument("--conditions", type=float, nargs="+", default=conditions)
    parser.add_argument("--seeds", type=int, default=3, help="matrices a condition")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="timed calls a round")
    options = parser.parse_args()
    for text in options.shapes:
        table(*map(int, text.split("x")), options)
    print(measuring.where(options))


if __name__ == "__main__":
    main()
