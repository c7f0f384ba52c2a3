"""Accuracy and speed of ways to an orthonormal basis, in float32.

    taskset -c 0 python benchmarks/orthonormalize.py

* Cholesky QR with as many passes as the row says, all but the last of them shifted, in
  the library's own arithmetic; four are its default.
* Householder QR.
* Randomised Cholesky QR, as in microsoft/dion: the triangle of a Householder QR of a
  random sketch of 1.25 times as many rows as columns, rounded up to a multiple of 128,
  and a plain pass of Cholesky QR. A square matrix has no room for a sketch: there,
  as in microsoft/dion, it is Householder QR.

Columns of random matrices with singular values from 1 down to 1 / condition, evenly
spaced on a logarithmic scale; those rounded to bfloat16 lose small singular values in
rounding noise. The error is the largest element of |P^T P - I|. The span error is the
largest part of a column of the input outside the span of P, in units of its length.
Both are the worst over matrices, computed in float64; `nan` is worse than any number.

Times are ratios to the default's. Calls take turns in random order; a round's ratio is
that of medians, given are the median over rounds and the quartiles. On CPU time is that
of the processor, of all threads together; elsewhere it is a clock's.
"""

import argparse
import functools
import math
import random
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import curvadion_jax as cd

# How many passes there are is no option of the library.
from curvadion_jax import _orthonormalize
from curvadion_jax._matrices import matmul

DEFAULT = "Cholesky QR, 4 passes"
Orthonormalize = Callable[[jax.Array], jax.Array]


def cholesky_qr(a: jax.Array, passes: int) -> jax.Array:
    """`curvadion_jax.cholesky_qr` with another number of passes."""
    shift = max(20, 2 * a.shape[-1]) * float(jnp.finfo(a.dtype).eps)
    for _ in range(passes - 1):
        a = _orthonormalize._shifted_pass(a, shift)
    return _orthonormalize._final_pass(a, shift)


def randomised_cholesky_qr(a: jax.Array) -> jax.Array:
    """`orthogonalize` of microsoft/dion's dion_reference.py, "rcqr"."""
    rows, cols = a.shape
    if rows <= cols:
        return jnp.linalg.qr(a)[0]
    size = 128 * math.ceil(1.25 * cols / 128)
    sketch = jax.random.normal(jax.random.key(0), (size, rows)) / math.sqrt(size)
    triangle = jnp.linalg.qr(matmul(sketch, a), mode="r")
    divide = functools.partial(lax.linalg.triangular_solve, left_side=False)
    a = divide(triangle, a)
    lower = jnp.linalg.cholesky(matmul(a.T, a), symmetrize_input=False)
    return divide(lower, a, lower=True, transpose_a=True)


def methods() -> dict[str, Orthonormalize]:
    """What the tables have a row for."""

    def passes(number: int) -> Orthonormalize:
        if number == 4:
            return jax.jit(cd.cholesky_qr)
        return jax.jit(functools.partial(cholesky_qr, passes=number))

    numbers = {1: "Cholesky QR, 1 pass"} | {
        number: f"Cholesky QR, {number} passes" for number in (2, 3, 4, 5)
    }
    return {name: passes(number) for number, name in numbers.items()} | {
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


def worst(values: list[float]) -> str:
    return "nan" if any(map(math.isnan, values)) else f"{max(values):.0e}"


def seconds(
    rows: dict[str, Orthonormalize], x: jax.Array, calls: int, order: random.Random
) -> dict[str, float]:
    """Median time of a call of each, in turn."""
    clock = time.perf_counter
    if jax.default_backend() == "cpu":
        clock = time.process_time
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(calls):
        for name in order.sample(list(rows), len(rows)):
            start = clock()
            rows[name](x).block_until_ready()
            taken[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def table(shape: tuple[int, int], options: argparse.Namespace) -> list[str]:
    """The lines of a Markdown table."""
    rows = methods()
    exact, rounded = {}, {}
    for condition in options.conditions:
        inputs = [matrix(*shape, condition, seed) for seed in range(options.seeds)]
        coarse = [np.asarray(a.astype(jnp.bfloat16), np.float32) for a in inputs]
        for name, basis in rows.items():
            exact[name, condition] = [errors(a, basis(a)) for a in inputs]
            rounded[name, condition] = [errors(a, basis(a)) for a in coarse]
    x, order = jnp.asarray(inputs[0]), random.Random(0)
    rounds = [seconds(rows, x, options.calls, order) for _ in range(options.rounds)]

    def line(name: str) -> str:
        ratios = [each[name] / each[DEFAULT] for each in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        each = [exact[name, condition] for condition in options.conditions]
        coarse = [e for c in options.conditions for e in rounded[name, c]]
        cells = [
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            *(worst([error for error, _ in found]) for found in each),
            worst([span for found in each for _, span in found]),
            worst([error for error, _ in coarse]),
            worst([span for _, span in coarse]),
        ]
        return f"| {name} | " + " | ".join(cells) + " |"

    conditions = " | ".join(f"error, {c:.0e}" for c in options.conditions)
    return [
        f"{shape[0]} x {shape[1]}; the default takes "
        f"{1e3 * statistics.median([each[DEFAULT] for each in rounds]):.3g} ms",
        "",
        f"| method | time over the default | {conditions} | span error, worst "
        "| bfloat16: error, worst | span error, worst |",
        "|---" * (len(options.conditions) + 5) + "|",
        *(line(name) for name in rows),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["384x96", "768x192", "3072x192", "768x768"]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="ROWSxCOLUMNS")
    conditions = [1.0, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12]
    parser.add_argument("--conditions", type=float, nargs="+", default=conditions)
    parser.add_argument("--seeds", type=int, default=3, help="matrices a condition")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="timed calls a round")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, for quartiles")
    for text in options.shapes:
        rows, cols = (int(side) for side in text.split("x"))
        print("\n".join(table((rows, cols), options)), flush=True)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {vars(options)}")


if __name__ == "__main__":
    main()
