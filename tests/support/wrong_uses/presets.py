"""Arguments of the presets."""

import curvadion_jax as cd
from wrong_uses.build import NEGATIVE, RATE
from wrong_uses.case import calls

KNOWN = {"presets": cd.presets, "nan": float("nan")}
_ROWS = [
    (
        "presets.local_sgd(0.1, k=0)",
        ValueError,
        "got 0",
        "the period k must be at least 1",
    ),
    ("presets.local_sgd('0.1')", TypeError, "got '0.1'", RATE),
    (
        "presets.local_sgd(0.1, momentum=1.5)",
        ValueError,
        "got 1.5",
        "momentum must lie in [0, 1)",
    ),
    (
        "presets.diloco(0.1, outer_momentum=1.5)",
        ValueError,
        "got 1.5",
        "must lie in [0, 1)",
    ),
    (
        "presets.diloco(0.1, outer_learning_rate='0.7')",
        TypeError,
        "got '0.7'",
        "must be a number",
    ),
    (
        "presets.diloco(0.1, weight_decay=nan)",
        ValueError,
        "got nan",
        "must not be negative or",
    ),
    (
        "presets.muloco(0.1, k=30.0)",
        TypeError,
        "got 30.0",
        "the period k must be an int",
    ),
    (
        "presets.muloco(0.1, adam_learning_rate='x')",
        TypeError,
        "got 'x'",
        "must be a number or a sche",
    ),
    (
        "presets.muloco(0.1, outer_momentum=-0.1)",
        ValueError,
        "got -0.1",
        "must lie in [0, 1)",
    ),
    (
        "presets.paper(0.1, threshold='0.3')",
        TypeError,
        "got '0.3'",
        "must be a number or a schedule",
    ),
    (
        "presets.paper(0.1, local_learning_rate=-1)",
        ValueError,
        "got -1",
        "must not be negative",
    ),
    (
        "presets.authors_code(0.1, other_optimizer=3)",
        TypeError,
        "got 3",
        "must be an Optax transformation",
    ),
    ("presets.authors_code(0.1, threshold=-0.3)", ValueError, "got -0.3", NEGATIVE),
    (
        "presets.synchronous_dion(0.1, rank=1.5)",
        ValueError,
        "got 1.5",
        "must lie in (0, 1]",
    ),
]
CASES = calls(KNOWN, _ROWS)
