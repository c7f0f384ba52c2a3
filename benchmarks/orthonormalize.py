"""Accuracy and speed of Cholesky QR against Householder QR, in float32.

    python benchmarks/orthonormalize.py

Columns of random matrices with singular values from 1 down to 1 / condition, evenly
spaced on a logarithmic scale. The error is the largest element of |P^T P - I|. Times
are medians over calls that alternate between the two, given as a ratio; under 1
Cholesky QR is faster.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import curvadion_jax as cd


def matrix(rows: int, cols: int, condition: float, seed: int) -> jax.Array:
    """A float32 matrix with a given condition number, made in float64."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(rows, cols)))[0]
    right = np.linalg.qr(rng.normal(size=(cols, cols)))[0]
    values = np.logspace(0, -np.log10(condition), cols)
    return jnp.asarray(left * values @ right, jnp.float32)


def error(basis: jax.Array) -> float:
    """Largest element of |P^T P - I|, computed in float64."""
    p = np.asarray(basis, np.float64)
    return float(np.abs(p.T @ p - np.eye(p.shape[1])).max())


def ratio(first, second, x: jax.Array, calls: int) -> float:
    """Time of the first function over that of the second, medians of calls in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second):
        function(x).block_until_ready()
    for _ in range(calls):
        for function, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function(x).block_until_ready()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="matrices a row")
    parser.add_argument("--calls", type=int, default=20, help="timed calls a row")
    options = parser.parse_args()
    cholesky, householder = jax.jit(cd.cholesky_qr), jax.jit(cd.householder_qr)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    print("shape        condition  cholesky error  householder error  time ratio")
    for shape in [(384, 96), (768, 192), (768, 768)]:
        for condition in (1e1, 1e4, 1e6, 1e8, 1e10, 1e12):
            xs = [matrix(*shape, condition, seed) for seed in range(options.seeds)]
            worst = [
                max(error(function(x)) for x in xs)
                for function in (cholesky, householder)
            ]
            speed = ratio(cholesky, householder, xs[0], options.calls)
            print(
                f"{shape!s:12s} {condition:9.0e} {worst[0]:15.1e} {worst[1]:18.1e}"
                f" {speed:11.2f}"
            )


if __name__ == "__main__":
    main()
