"""Arguments of the cost model."""

import math

from curvadion_jax import cost_model
from curvadion_jax.compressors import Payload
from wrong_uses.case import calls

KNOWN = {
    **vars(cost_model),
    **{"nan": math.nan, "inf": math.inf, "Payload": Payload},
    **{"link": cost_model.Link(5e9, 0.1)},
    **{"size": cost_model.ModelSize((cost_model.MatrixShape(1, 8, 4),), 4)},
}
ABOVE = "give a number above 0, in bits per second"
FINITE = "give a finite number of at least 0"
WHOLE = "give a whole number"
RATE = "between 0 and 1 (3% is 0.03)"
_CALLS = [
    ("Link(0, 0.1)", ValueError, "Link.bandwidth is 0", ABOVE),
    ("Link(-5e9, 0.1)", ValueError, "Link.bandwidth is -5000000000.0", ABOVE),
    ("Link(nan, 0.1)", ValueError, "Link.bandwidth is nan", ABOVE),
    ("Link('5 Gb/s', 0.1)", TypeError, "bandwidth is '5 Gb/s'", "give a number"),
    ("Link(1e9, None)", TypeError, "round_trip_time is None", "give a number"),
    ("Link(1e9, -1.0)", ValueError, "round_trip_time is -1.0", FINITE),
    ("Link(1e9, inf)", ValueError, "round_trip_time is inf", FINITE),
    ("all_reduce_bytes(8, 0)", ValueError, "replicas is 0", WHOLE),
    ("all_reduce_bytes(8, 2.5)", TypeError, "replicas is 2.5", WHOLE),
    ("all_reduce_bytes(-8, 2)", ValueError, "payload is -8", FINITE),
    ("all_reduce_bytes('1 GB', 2)", TypeError, "payload is '1 GB'", "give a number"),
    ("all_gather_bytes(-8, 2)", ValueError, "payload is -8", FINITE),
    ("ring_time(8, -1, link)", ValueError, "replicas is -1", WHOLE),
    ("ring_time(8, 2, 5e9)", TypeError, "link is 5000000000.0", "give a Link: Link("),
    ("tree_time(8, 0, link)", ValueError, "replicas is 0", WHOLE),
    ("tree_time(nan, 2, link)", ValueError, "payload is nan", FINITE),
    ("bytes_per_step(8, 2, 1.01)", ValueError, "sync_rate is 1.01", RATE),
    ("bytes_per_step(8, 2, '3%')", TypeError, "sync_rate is '3%'", "give a number"),
    ("flag_time(8, link, ask_every=0)", ValueError, "ask_every is 0", WHOLE),
    ("flag_time(8, link, ask_every=2.5)", TypeError, "ask_every is 2.5", WHOLE),
    ("flag_time(8, link, hidden_behind=-1.0)", ValueError, "is -1.0", FINITE),
    (
        "flag_time(8, link, algorithm='ring')",
        *(TypeError, "algorithm is 'ring'", "give a function such as tree_time"),
    ),
    ("Method(1.0, 1.0, -0.1)", ValueError, "sync_rate is -0.1", RATE),
    ("Method(1.0, 1.0, nan)", ValueError, "sync_rate is nan", RATE),
    ("Method(-1.0, 1.0)", ValueError, "compute_time is -1.0", FINITE),
    ("Method(1.0, 1.0, 0.1, -2.0)", ValueError, "flag_time is -2.0", FINITE),
    ("speedup(0.3, 0.9)", TypeError, "method is 0.3", "give a Method: Method("),
    ("break_even(0.3, 0.9)", TypeError, "method is 0.3", "give a Method: Method("),
    (
        "speedup(Method(0.0, 0.0), Method(1.0, 1.0))",
        *(ValueError, "takes 0 s", "give a compute_time above 0"),
    ),
    ("MatrixShape(1, 0, 4)", ValueError, "rows is 0", WHOLE),
    ("MatrixShape(1, 4, 4).resolve_rank(0)", ValueError, "got 0", "must be at least 1"),
    ("MatrixShape(1, 4, 4).resolve_rank(1.5)", ValueError, "1.5", "must lie in (0, 1]"),
    ("ModelSize((), -1)", ValueError, "other_elements is -1", WHOLE),
    ("model_size('7B')", TypeError, "is '7B'", "give arrays or jax.ShapeDtypeStruct"),
    ("model_size({'w': 1.5})", TypeError, "is 1.5", "give arrays or jax.ShapeDtype"),
    ("model_size(-1)", ValueError, "parameters is -1", WHOLE),
    ("model_size(100, [(1, 4, 4)])", TypeError, "is (1, 4, 4)", "give a MatrixShape"),
    (
        "model_size(10, [MatrixShape(1, 4, 4)])",
        *(ValueError, "16 elements but the parameters only 10", "list every matrix on"),
    ),
    ("gradient_payload(size, 0)", ValueError, "itemsize is 0", WHOLE),
    ("gradient_payload(7_000)", TypeError, "size is 7000", "give a ModelSize"),
    ("factor_payload(size, 'full')", TypeError, "got 'full'", "must be a plain int"),
    (
        "share_of_synchronous(Payload(gathered=8), size)",
        *(ValueError, "replicas is None", "give the number of them"),
    ),
    (
        "share_of_synchronous(8, ModelSize())",
        *(ValueError, "gradient_payload(size) is 0", "give a number above 0, in bytes"),
    ),
]
CASES = calls(KNOWN, _CALLS)
