"""Arguments of `curvadion`, `local_muon` and `dion`, and what these cannot take."""

import jax.numpy as jnp
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from wrong_uses.build import NEGATIVE, RATE, initialised, updated
from wrong_uses.case import calls, wrong

KNOWN = {**vars(triggers), **vars(synchronizers), **vars(cd), "optax": optax}
KNOWN |= {"nan": float("nan"), "inf": float("inf")}
DTYPE = "mu_dtype must be a floating-point dtype such as jax.numpy.bfloat16"
_ROWS = [
    ("curvadion(0.1, tau=0.3)", TypeError, "no argument 'tau'", "use threshold=0.3"),
    ("dion(lr=0.1)", TypeError, "no argument 'lr'", "use learning_rate=0.1"),
    ("local_muon(0.1, beta=0.9)", TypeError, "argument 'beta'", "use momentum=0.9"),
    ("curvadion('0.1')", TypeError, "got '0.1'", RATE),
    ("curvadion(None)", TypeError, "got None", RATE),
    ("curvadion(True)", TypeError, "got True", RATE),
    ("curvadion(-0.1)", ValueError, "got -0.1", NEGATIVE),
    ("curvadion(nan)", ValueError, "got nan", NEGATIVE),
    ("curvadion(inf)", ValueError, "got inf", "must be finite"),
    (
        "curvadion(0.1, rank='full')",
        TypeError,
        "got 'full'",
        "must be a plain int or float",
    ),
    ("curvadion(0.1, rank=0)", ValueError, "got 0", "rank must be at least 1"),
    ("curvadion(0.1, rank=2.0)", ValueError, "got 2.0", "for a fixed rank pass an int"),
    (
        "curvadion(0.1, momentum='0.9')",
        TypeError,
        "got '0.9'",
        "must be a number in [0, 1)",
    ),
    ("curvadion(0.1, momentum=1)", ValueError, "got 1", "momentum must lie in [0, 1)"),
    (
        "curvadion(0.1, weight_decay='0.1')",
        TypeError,
        "got '0.1'",
        "must be a number or a schedule",
    ),
    ("curvadion(0.1, weight_decay=-0.1)", ValueError, "got -0.1", NEGATIVE),
    ("curvadion(0.1, mu_dtype='flaot32')", TypeError, "got 'flaot32'", DTYPE),
    ("curvadion(0.1, mu_dtype='int8')", TypeError, "got 'int8'", DTYPE),
    (
        "curvadion(0.1, other_optimizer=0.1)",
        TypeError,
        "got 0.1",
        "such as optax.adamw(1e-3)",
    ),
    (
        "curvadion(0.1, other_optimizer=optax.sgd)",
        TypeError,
        "<function sgd",
        "such as optax.adamw(1e-3)",
    ),
    (
        "curvadion(0.1, adam_learning_rate='0.1')",
        TypeError,
        "'0.1'",
        "must be a number or a",
    ),
    (
        "curvadion(0.1, error_feedback='no')",
        TypeError,
        "got 'no'",
        "must be True or False",
    ),
    ("curvadion(0.1, seed=1.5)", TypeError, "got 1.5", "seed must be an int"),
    (
        "curvadion(0.1, axis_name=0)",
        TypeError,
        "got 0",
        "axis_name must be a string or None",
    ),
    (
        "curvadion(0.1, axis_name=('replica',))",
        TypeError,
        "('replica',)",
        "must be a string or None",
    ),
    ("curvadion(0.1, budget='1%')", TypeError, "got '1%'", "budget must be a number"),
    ("curvadion(0.1, budget=10)", ValueError, "got 10", "ten percent is 0.1"),
    (
        "curvadion(0.1, budget=0)",
        ValueError,
        "got 0",
        "budget must be above 0 and finite",
    ),
    (
        "curvadion(0.1, budget=nan)",
        ValueError,
        "got nan",
        "budget must not be negative or NaN",
    ),
    (
        "curvadion(0.1, ask_every=0)",
        ValueError,
        "got 0",
        "ask_every must be at least 1",
    ),
    ("curvadion(0.1, ask_every=2.0)", TypeError, "got 2.0", "ask_every must be an int"),
    (
        "curvadion(0.1, ask_every=True)",
        TypeError,
        "got True",
        "ask_every must be an int",
    ),
    (
        "curvadion(0.1, allow_unchecked='yes')",
        TypeError,
        "got 'yes'",
        "must be True or False",
    ),
    (
        "curvadion(0.1, threshold='0.3')",
        TypeError,
        "got '0.3'",
        "threshold must be a number or a schedule",
    ),
    (
        "curvadion(0.1, threshold=0.3, budget=0.01)",
        ValueError,
        "got both",
        "give a threshold or a budget",
    ),
    ("curvadion(0.1, bits=3)", ValueError, "got 3", "bits must be 8, 4, 2 or 1"),
    (
        "curvadion(0.1, bits=4, synchronizer=reconcile())",
        ValueError,
        "got both",
        "give bits or a synchronizer",
    ),
    ("local_muon('0.1')", TypeError, "got '0.1'", RATE),
    ("local_muon(-0.1)", ValueError, "got -0.1", NEGATIVE),
    (
        "local_muon(0.1, momentum='0.9')",
        TypeError,
        "got '0.9'",
        "must be a number in [0, 1)",
    ),
    (
        "local_muon(0.1, weight_decay=-0.1)",
        ValueError,
        "got -0.1",
        NEGATIVE,
    ),
    ("local_muon(0.1, mu_dtype='int8')", TypeError, "got 'int8'", DTYPE),
    (
        "local_muon(0.1, other_optimizer=0.1)",
        TypeError,
        "got 0.1",
        "such as optax.adamw(1e-3)",
    ),
    (
        "local_muon(0.1, adam_learning_rate=nan)",
        ValueError,
        "got nan",
        NEGATIVE,
    ),
    (
        "local_muon(0.1, other_optimizer=optax.sgd(0.5), adam_learning_rate=0.3)",
        ValueError,
        "got both, 0.3",
        "give it to other_optimizer itself",
    ),
    ("local_muon(0.1, budget=10)", ValueError, "got 10", "ten percent is 0.1"),
    ("local_muon(0.1, bits=2.0)", TypeError, "got 2.0", "bits must be an int"),
    (
        "local_muon(0.1, bits=4, synchronizer=reconcile())",
        ValueError,
        "got both",
        "give bits or a synchronizer",
    ),
    (
        "local_muon(0.1, budget=0.1, trigger=always())",
        ValueError,
        "got both",
        "give a budget or a trigger",
    ),
    ("dion('0.1')", TypeError, "got '0.1'", RATE),
    ("dion(nan)", ValueError, "got nan", NEGATIVE),
    ("dion(0.1, momentum=None)", TypeError, "got None", "must be a number in [0, 1)"),
    ("dion(0.1, mu_dtype=3)", TypeError, "got 3", DTYPE),
    (
        "dion(0.1, orthonormalize='qr')",
        TypeError,
        "'qr'",
        "such as curvadion_jax.cholesky_qr",
    ),
    wrong(
        "dion(0.1, orthonormalize=jnp.linalg.qr)",
        lambda: updated(cd.dion(0.1, orthonormalize=jnp.linalg.qr)),
        *(ValueError, "got QRResult", "take one of these"),
    ),
    (
        "dion(0.1, error_feedback=1)",
        TypeError,
        "got 1",
        "error_feedback must be True or False",
    ),
    ("dion(0.1, seed='a')", TypeError, "got 'a'", "seed must be an int"),
    (
        "dion(0.1, other_optimizer=optax.sgd(0.5), adam_learning_rate=0.3)",
        ValueError,
        "got both, 0.3",
        "give it to other_optimizer itself",
    ),
    ("describe_partition({}, rank=0)", ValueError, "got 0", "rank must be at least 1"),
]
CASES = [
    *calls(KNOWN, _ROWS),
    wrong(
        "curvadion(0.1, rank=5), no matrix with a side above 4",
        lambda: initialised(cd.curvadion(0.1, rank=5)),
        *(ValueError, "(the largest is 4)", "pass a smaller rank, or rank=1.0"),
    ),
    wrong(
        "optax.inject_hyperparams(dion)(0.1, rank=2)",
        lambda: initialised(optax.inject_hyperparams(cd.dion)(0.1, rank=2)),
        *(TypeError, "got JitTracer(", "name it in static_args"),
    ),
    wrong(
        "scale_by_dion() for a bias",
        lambda: initialised(cd.scale_by_dion()),
        *(ValueError, "'bias' of shape (5,)", "use curvadion_jax.dion"),
    ),
]
