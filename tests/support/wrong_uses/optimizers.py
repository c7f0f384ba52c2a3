"""Arguments of `curvadion`, `local_muon`, `dion`, `adaptive_sync` and the presets."""

import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers
from wrong_uses.build import initialised, parts, updated
from wrong_uses.case import calls, wrong

KNOWN = {**vars(triggers), **vars(synchronizers), **vars(cd), "optax": optax}
KNOWN |= {"nan": float("nan"), "inf": float("inf"), "adamw": optax.adamw}
RATE = "learning_rate must be a number or a schedule"
NEGATIVE = "must not be negative or NaN"
DTYPE = "mu_dtype must be a floating-point dtype such as jax.numpy.bfloat16"
_CALLS = [
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
    (
        "dion(0.1, error_feedback=1)",
        TypeError,
        "got 1",
        "error_feedback must be True or False",
    ),
    ("dion(0.1, seed='a')", TypeError, "got 'a'", "seed must be an int"),
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
    (
        "local_muon(0.1, budget=0.1, trigger=always())",
        ValueError,
        "got both",
        "give a budget or a trigger",
    ),
    (
        "dion(0.1, other_optimizer=optax.sgd(0.5), adam_learning_rate=0.3)",
        ValueError,
        "got both, 0.3",
        "give it to other_optimizer itself",
    ),
    ("describe_partition({}, rank=0)", ValueError, "got 0", "rank must be at least 1"),
]
CASES = [
    *calls(KNOWN, _CALLS),
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
    wrong(
        "relative_momentum_change(0.1) around SGD without momentum",
        lambda: updated(
            parts(inner=optax.sgd(0.1), trigger=triggers.relative_momentum_change(0.1))
        ),
        *(ValueError, "no field named 'momentum'", "Use an inner optimizer with mom"),
    ),
]
