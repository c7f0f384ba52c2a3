"""Arguments of `adaptive_sync`, and parts that do not go together."""

import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from wrong_uses.build import parts, updated
from wrong_uses.case import calls, wrong

KNOWN = {**vars(triggers), **vars(synchronizers), **vars(cd)}
KNOWN |= {"optax": optax, "adamw": optax.adamw}
_ROWS = [
    (
        "adaptive_sync(0.1, every_k(2), reconcile())",
        TypeError,
        "got 0.1",
        "such as optax.adamw(1e-3)",
    ),
    (
        "adaptive_sync(optax.sgd, every_k(2), reconcile())",
        TypeError,
        "got <function sgd",
        "such as optax.adamw(1e-3)",
    ),
    (
        "adaptive_sync(optax.sgd(0.1), drift(0.1), reconcile(momentum=False, delay=2))",
        *(ValueError, "got trigger: one that looks at", "give delay=0"),
    ),
    (
        "adaptive_sync(None, every_k(2), reconcile())",
        TypeError,
        "got None",
        "must be an Optax transformation",
    ),
    (
        "adaptive_sync(adamw(0.1), every_k, reconcile())",
        TypeError,
        "<function every_k",
        "such as every_k(10)",
    ),
    (
        "adaptive_sync(adamw(0.1), 10, reconcile())",
        TypeError,
        "got 10",
        "such as every_k(10)",
    ),
    (
        "adaptive_sync(adamw(0.1), every_k(2), reconcile)",
        TypeError,
        "got <function reconcile",
        "such as reconcile()",
    ),
    (
        "adaptive_sync(adamw(0.1), every_k(2), None)",
        TypeError,
        "got None",
        "such as reconcile()",
    ),
    wrong(
        "relative_momentum_change(0.1) around SGD without momentum",
        lambda: updated(
            parts(inner=optax.sgd(0.1), trigger=triggers.relative_momentum_change(0.1))
        ),
        *(ValueError, "no field named 'momentum'", "Use an inner optimizer with mom"),
    ),
]
CASES = calls(KNOWN, _ROWS)
