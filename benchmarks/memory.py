"""Bytes of optimizer state a parameter, read off the state itself.

    python benchmarks/memory.py

The model is a GPT of 160 million parameters: 12 layers of width 768 in one stack, and
a vocabulary of 50304 with an output head of its own. Nothing is computed: the state is
what `jax.eval_shape` says of `init`. Parameters are float32 and not counted; they are
4 bytes more. What only a sync touches is the `sync_state` of `adaptive_sync`; every
step reads and writes the rest.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import curvadion_jax as cd
from curvadion_jax import compressors, presets, synchronizers

LAYERS, WIDTH, VOCABULARY = 12, 768, 50304
# Rates change no shape.
RATE = 0.01


def parameters() -> dict:
    """The parameter tree of the model, shapes and dtypes only."""

    def kernel(*shape: int) -> dict:
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def scale(*shape: int) -> dict:
        return {"scale": jax.ShapeDtypeStruct(shape, jnp.float32)}

    attention = {
        name: kernel(LAYERS, WIDTH, WIDTH) for name in ("query", "key", "value", "out")
    }
    return {
        "embed": {"embedding": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)},
        "blocks": {
            "attention": attention,
            "attention_norm": scale(LAYERS, WIDTH),
            "mlp_norm": scale(LAYERS, WIDTH),
            "up": kernel(LAYERS, WIDTH, 4 * WIDTH),
            "down": kernel(LAYERS, 4 * WIDTH, WIDTH),
        },
        "final_norm": scale(WIDTH),
        "lm_head": kernel(WIDTH, VOCABULARY),
    }


def _reconciling(**arguments) -> optax.GradientTransformation:
    return cd.local_muon(RATE, synchronizer=synchronizers.reconcile(**arguments))


def optimizers() -> dict[str, optax.GradientTransformation]:
    """What the table has a row for, by its name there."""
    numbers = cd.default_dimension_numbers(parameters())
    # The same matrices as Dion's.
    muon = optax.contrib.muon(
        RATE,
        muon_weight_dimension_numbers=jax.tree.map(
            lambda x: x and optax.contrib.MuonDimensionNumbers(x[0], x[1]),
            numbers,
            is_leaf=lambda x: x is None or isinstance(x, cd.DimensionNumbers),
        ),
    )
    int8, half = compressors.quantize(8), jnp.bfloat16
    return {
        "`optax.adamw`": optax.adamw(RATE),
        "`optax.contrib.muon`, AdamW for the rest": muon,
        "`dion`, rank 1/4": cd.dion(RATE, 0.25),
        "`dion`, full rank": cd.dion(RATE, 1.0),
        "`dion`, rank 1/4, bfloat16 state": cd.dion(RATE, 0.25, mu_dtype=half),
        "`curvadion`": cd.curvadion(RATE),
        "`curvadion`, rank 1/4": cd.curvadion(RATE, rank=0.25),
        "`local_muon`": cd.local_muon(RATE),
        "`local_muon`, bfloat16 momenta": cd.local_muon(RATE, mu_dtype=half),
        "`local_muon`, plain average": _reconciling(momentum=False),
        "`local_muon`, plain average of momenta too": _reconciling(),
        "`local_muon`, orthonormal outer step": _reconciling(
            outer=cd.outer.orthonormal(), momentum=False
        ),
        "`local_muon`, plain average in 8 bits": _reconciling(
            compressor=int8, momentum=False
        ),
        "`presets.synchronous_dion`": presets.synchronous_dion(RATE),
        "`presets.paper`": presets.paper(RATE),
        "`presets.authors_code`": presets.authors_code(RATE),
        "`presets.local_sgd`": presets.local_sgd(RATE),
        "`presets.diloco`": presets.diloco(RATE),
        "`presets.muloco`": presets.muloco(RATE),
    }


def _bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows() -> Iterator[tuple[str, float, float]]:
    """Name, and bytes a parameter that every step and that only a sync touches."""
    params = parameters()
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    for name, tx in optimizers().items():
        state = jax.eval_shape(tx.init, params)
        total = _bytes(state)
        at_syncs = 0
        if isinstance(state, cd.AdaptiveSyncState):
            at_syncs = _bytes(state.sync_state)
        yield name, (total - at_syncs) / count, at_syncs / count


def table() -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| optimizer | every step | syncs only | together |",
        "|---|---|---|---|",
        *(
            f"| {name} | {step:.2f} | {sync:.2f} | {step + sync:.2f} |"
            for name, step, sync in rows()
        ),
    ]


if __name__ == "__main__":
    print("\n".join(table()))
