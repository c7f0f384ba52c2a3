"""Synchronizers, compressors and outer optimizers."""

from typing import Any

import optax

from curvadion_jax import compressors, outer, synchronizers
from wrong_uses.build import initialised, parts, updated
from wrong_uses.case import calls, wrong

COMPRESSOR = "such as quantize(8) or low_rank(0.25)"
KNOWN = {**vars(synchronizers), **vars(compressors), "outer": outer, "optax": optax}
KNOWN |= {"nan": float("nan")}


def sending(synchronizer: Any, inner: Any = None) -> Any:
    tx = parts(synchronizer=synchronizer, **({} if inner is None else {"inner": inner}))
    return initialised(tx)


def compressed(**functions: Any) -> Any:
    """`reconcile` with a compressor of one's own."""
    form = compressors.exact()._replace(**functions)
    return parts(synchronizer=synchronizers.reconcile(compressor=form))


_SYNCHRONIZERS = [
    (
        "reconcile(0.7)",
        TypeError,
        "got 0.7",
        "such as optax.sgd(0.7), or None for the plain average",
    ),
    (
        "reconcile(optax.sgd)",
        TypeError,
        "got <function sgd",
        "such as optax.sgd(0.7), or None",
    ),
    ("reconcile(compressor=8)", TypeError, "got 8", COMPRESSOR),
    ("reconcile(compressor=quantize)", TypeError, "got <function quantize", COMPRESSOR),
    ("reconcile(compressor=True)", TypeError, "got True", COMPRESSOR),
    ("reconcile(momentum=8)", TypeError, "got 8", COMPRESSOR),
    ("reconcile(momentum=None)", TypeError, "got None", COMPRESSOR),
    (
        "reconcile(other_state='all')",
        TypeError,
        "got 'all'",
        "other_state must be True or False",
    ),
    (
        "reconcile(orthonormalize='qr')",
        TypeError,
        "got 'qr'",
        "such as curvadion_jax.cholesky_qr",
    ),
    ("reconcile(fragments=0)", ValueError, "got 0", "fragments must be at least 1"),
    ("reconcile(fragments=2.0)", TypeError, "got 2.0", "fragments must be an int"),
    wrong(
        "reconcile(fragments=5) for four parameters",
        lambda: sending(synchronizers.reconcile(fragments=5)),
        *(ValueError, "got ['bias', 'embed', 'tall', 'wide']", "give fewer fragments"),
    ),
    (
        "reconcile(momentum_every=True)",
        TypeError,
        "got True",
        "momentum_every must be an int",
    ),
    (
        "reconcile(delay=2)",
        ValueError,
        "delay=2 is for parameters",
        "Give momentum=False",
    ),
    (
        "reconcile(momentum=False, delay=-1)",
        *(ValueError, "got -1", "delay must be at least 0"),
    ),
    (
        "reconcile(momentum_every=2, momentum=False)",
        ValueError,
        "momentum_every=2",
        "leave one of them out",
    ),
    wrong(
        "reconcile(outer.orthonormal(), fragments=2)",
        lambda: sending(synchronizers.reconcile(outer.orthonormal(), fragments=2)),
        *(
            ValueError,
            "must see all parameters at once",
            "use it with reconcile(fragments=1)",
        ),
    ),
    ("average_gradients(8)", TypeError, "got 8", COMPRESSOR),
    ("average_factors(8)", TypeError, "got 8", COMPRESSOR),
    (
        "average_factors(low_rank(1))",
        ValueError,
        "got one with a state",
        "such as quantize(8)",
    ),
    wrong(
        "two momenta of every parameter, compressed",
        lambda: sending(
            synchronizers.reconcile(momentum=compressors.quantize(8)),
            optax.chain(optax.trace(0.9), optax.sgd(0.1, 0.5)),
        ),
        *(ValueError, "momenta of", "give momentum=True, which averages all of them"),
    ),
    wrong(
        "momenta of an optimizer without one, compressed",
        lambda: sending(
            synchronizers.reconcile(momentum=compressors.quantize(8)), optax.sgd(0.1)
        ),
        *(ValueError, "the inner optimizer keeps none", "give momentum=False"),
    ),
    wrong(
        "average_factors() around AdamW",
        lambda: sending(synchronizers.average_factors(), optax.adamw(0.1)),
        *(ValueError, "there is no DionState in its state", "use curvadion_jax.dion"),
    ),
    wrong(
        "Synchronizer(cycle=(0, 2)), without a variant 1",
        lambda: parts(synchronizer=synchronizers.reconcile()._replace(cycle=(0, 2))),
        *(ValueError, "got (0, 2)", "names every variant from 0 on, such as (0, 0, 1)"),
    ),
    wrong(
        "Synchronizer(after_local_step=0)",
        lambda: parts(
            synchronizer=synchronizers.reconcile()._replace(after_local_step=0)
        ),
        *(TypeError, "got 0", "after_local_step must be True or False"),
    ),
    wrong(
        "Synchronizer whose payload returns 100",
        lambda: updated(
            parts(
                synchronizer=synchronizers.reconcile()._replace(
                    payload=lambda *arguments: 100
                )
            )
        ),
        *(TypeError, "got 100", "such as Payload(averaged=bytes)"),
    ),
    wrong(
        "Compressor whose payload returns 100",
        lambda: updated(compressed(payload=lambda *arguments: 100)),
        *(TypeError, "got 100", "such as Payload(averaged=bytes)"),
    ),
    wrong(
        "Compressor whose average returns a pair",
        lambda: updated(compressed(average=lambda tree, *_: (tree, tree))),
        *(TypeError, "got a tuple", "return a curvadion_jax.compressors.Averaged("),
    ),
    wrong(
        "Compressor whose average returns unsent=()",
        lambda: updated(
            compressed(
                average=lambda tree, state, *_: compressors.Averaged(tree, (), state)
            )
        ),
        *(ValueError, "got ()", "must be a tree like the one that it is given"),
    ),
]
_COMPRESSORS = [
    ("quantize(5)", ValueError, "got 5", "bits must be 8, 4, 2 or 1"),
    ("quantize(8.0)", TypeError, "got 8.0", "bits must be an int"),
    ("quantize(8, block=3)", ValueError, "got 3", "block must be even and at least 2"),
    ("quantize(8, block=0)", ValueError, "got 0", "block must be even and at least 2"),
    ("quantize(2, block=6)", ValueError, "got 6", "block must be a multiple of 4"),
    ("quantize(1, block=12)", ValueError, "got 12", "block must be a multiple of 8"),
    ("quantize(4, mean_bits=3)", ValueError, "got 3", "mean_bits must be 8, 4, 2 or 1"),
    ("quantize(4, mean_bits=True)", TypeError, "got True", "mean_bits must be an int"),
    ("top_k(0.0)", ValueError, "got 0.0", "fraction must lie in (0, 1]"),
    ("top_k(1.5)", ValueError, "got 1.5", "fraction must lie in (0, 1]"),
    ("top_k(nan)", ValueError, "got nan", "fraction must lie in (0, 1]"),
    ("top_k('0.1')", TypeError, "got '0.1'", "fraction must be a number in (0, 1]"),
    ("top_k(True)", TypeError, "got True", "fraction must be a number in (0, 1]"),
    ("top_k(0.1, bits=3)", ValueError, "got 3", "bits must be 8, 4, 2, 1 or None"),
    ("top_k(0.1, bits=8.0)", TypeError, "got 8.0", "bits must be an int or None"),
    ("top_k(0.1, block=0)", ValueError, "got 0", "block must be at least 1"),
    ("top_k(0.1, block=2.0)", TypeError, "got 2.0", "block must be an int or None"),
    ("low_rank(0)", ValueError, "got 0", "rank must be at least 1"),
    ("low_rank(1.5)", ValueError, "got 1.5", "must lie in (0, 1]"),
    (
        "low_rank(1, power_iterations=0)",
        ValueError,
        "got 0",
        "power_iterations must be at least 1",
    ),
    (
        "low_rank(1, orthonormalize='qr')",
        TypeError,
        "got 'qr'",
        "such as curvadion_jax.cholesky_qr",
    ),
    ("chain(low_rank(1), 8)", TypeError, "got 8", COMPRESSOR),
    (
        "chain(low_rank(1), low_rank(1))",
        ValueError,
        "argument 1 of chain",
        "without a state, such as quantize(8)",
    ),
    (
        "chain(quantize(8), low_rank(1))",
        ValueError,
        "argument 0 of chain",
        "give low_rank there",
    ),
    (
        "outer.orthonormal('1.0')",
        TypeError,
        "got '1.0'",
        "learning_rate must be a number or a schedule",
    ),
    (
        "outer.orthonormal(momentum=1.0)",
        ValueError,
        "got 1.0",
        "momentum must lie in [0, 1)",
    ),
    ("outer.orthonormal(rank=0)", ValueError, "got 0", "rank must be at least 1"),
    (
        "outer.orthonormal(rank='full')",
        TypeError,
        "got 'full'",
        "must be a plain int or float",
    ),
]
CASES = calls(KNOWN, [*_SYNCHRONIZERS, *_COMPRESSORS])
