"""How many products the program of an optimizer's step has, and how many lines.

    python benchmarks/step/products.py
    python benchmarks/step/products.py --layers 24 --width 768

The parameters are six matrices a layer, each an array of its own, float32. Products are
counted in the lowered program, *distinct* by shapes of operands; a loop's body counts
once. Nothing is compiled or run.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import measuring
import optax

import curvadion_jax as cd

RATE = 0.01
METHODS = {
    "`dion`, rank 1/4": cd.dion(RATE, rank=0.25, dimension_numbers=measuring.matrices),
    "`dion`, rank 1": cd.dion(RATE, rank=1.0, dimension_numbers=measuring.matrices),
    "`local_muon`": cd.local_muon(RATE, dimension_numbers=measuring.matrices),
    "`optax.contrib.muon`": measuring.muon(RATE),
}


def parameters(layers: int, width: int) -> Any:
    """Shapes and dtypes of the kernels."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        f"layer_{index}": {
            name: {"kernel": jax.ShapeDtypeStruct(shape, "float32")}
            for name, shape in shapes.items()
        }
        for index in range(layers)
    }


def counts(tx: optax.GradientTransformation, params: Any) -> list[str]:
    """A row of the table."""

    def update(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    text = jax.jit(update).lower(params, state, params).as_text()
    products = re.findall(r"stablehlo\.dot_general.* : (\(.*)", text)
    numbers = len(products), len(set(products)), text.count("\n")
    return [f"{number:,.0f}" for number in numbers]


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12])
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    def rows():
        for layers in options.layers:
            params = parameters(layers, options.width)
            for name, tx in METHODS.items():
                yield [name, str(layers), *counts(tx, params)]

    header = ["optimizer", "layers", "products", "distinct", "lines"]
    measuring.table(header, rows())
    print(measuring.where(options))


if __name__ == "__main__":
    main()
