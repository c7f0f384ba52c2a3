"""What Dion loses by rounding the operands of its large products.

    python benchmarks/study/precision.py     # twelve runs, an hour of a core; resumes

Trains synchronous Dion of the study for 260 steps, at full rank and at rank 1/4. The
operands of the products with matrices are rounded as an accelerator rounds them, and
sums are float32: bfloat16 has 7 bits behind the leading one, TF32 has 10. (A CPU
computes in float32 whatever the precision, hence the rounding by hand.) The algebra of
the factors stays in float32. A line for each run goes to `results/precision.jsonl`; the
same runs without rounding are in `results/runs.jsonl`.
"""

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))

import jax
import jax.numpy as jnp
import study
from jax import lax
from rows import DION
from simulate import Run

from curvadion_jax import _matrix_view

FILE = study.RESULTS / "precision.jsonl"
MANTISSA_BITS = {"bfloat16": 7, "tf32": 10}
METHODS = (DION + ", rank 1/4", DION)


def rounded(a: jax.Array, b: jax.Array, precision: Any, *, bits: int) -> jax.Array:
    """The product of matrices whose operands are rounded; sums are float32."""
    del precision
    a, b = (lax.reduce_precision(x, 8, bits) for x in (a, b))
    return jnp.matmul(a, b, precision="highest")


def main() -> None:
    """Run the program."""
    without_rounding = study.read()
    for operands, bits in MANTISSA_BITS.items():
        # `_orthonormalize` has its own name for the product, and keeps it.
        multiply = functools.partial(rounded, bits=bits)
        _matrix_view.matmul = multiply
        for seed in study.SEEDS:
            for method in METHODS:
                task = {"operands": operands, "method": method, "seed": seed}
                if any(task.items() <= row.items() for row in study.rows_of(FILE)):
                    continue
                rate = study.best_rate(without_rounding, method) or 0.0
                run = Run(method, rate, seed, study.QUARTER)
                study.train_into(FILE, run, task)


if __name__ == "__main__":
    main()
