"""Arguments of the cost model."""

import math

from curvadion_jax import cost_model
from curvadion_jax.compressors import Payload
from wrong_uses.case import calls

KNOWN = {
    **vars(cost_model),
    **{"nan": math.nan, "inf": math.inf, "Payload": Payload},
    **{"link": cost_model.Link(5e9, 0.1)},
    **{"size": cost_model.ModelSize(36, ((1, 8, 4),))},
}
ABOVE = "give a number above 0, in bits per second"
FINITE = "give a finite number of at least 0"
WHOLE = "give a whole number"
RATE = "between 0 and 1 (3% is 0.03)"
_ROWS = [
    ("Link(0, 0.1)", ValueError, "Link.bandwidth is 0", ABOVE),
    ("Link(-5e9, 0.1)", ValueError, "Link.bandwidth is -5000000000.0", ABOVE),
    ("Link(nan, 0.1)", ValueError, "Link.bandwidth is nan", ABOVE),
    ("Link('5 Gb/s', 0.1)", TypeError, "bandwidth is '5 Gb/s'", "give a number"),
    ("Link(1e9, None)", TypeError, "round_trip_time is None", "give a number"),
    ("Link(1e9, -1.0)", ValueError, "round_trip_time is -1.0", FINITE),
    ("Link(1e9, inf)", ValueError, "round_trip_time is inf", FINITE),
    ("sync_bytes(8, 0)", ValueError, "replicas is 0", WHOLE),
    ("sync_bytes(8, 2.5)", TypeError, "replicas is 2.5", WHOLE),
    ("sync_bytes(-8, 2)", ValueError, "payload is -8", FINITE),
    ("sync_bytes('1 GB', 2)", TypeError, "payload is '1 GB'", "give a number"),
    ("sync_bytes(Payload(gathered=-8), 2)", ValueError, "payload is -8", FINITE),
    ("ring_time(8, -1, link)", ValueError, "replicas is -1", WHOLE),
    ("ring_time(8, 2, 5e9)", TypeError, "link is 5000000000.0", "give a Link: Link("),
    ("flag_time(0, link)", ValueError, "replicas is 0", WHOLE),
    ("ring_time(nan, 2, link)", ValueError, "payload is nan", FINITE),
    ("bytes_per_step(8, 2, 1.01)", ValueError, "sync_rate is 1.01", RATE),
    ("bytes_per_step(8, 2, '3%')", TypeError, "sync_rate is '3%'", "give a number"),
    ("flag_time(8, 5e9)", TypeError, "link is 5000000000.0", "give a Link: Link("),
    ("flag_time(8, link, ask_every=0)", ValueError, "ask_every is 0", WHOLE),
    ("flag_time(8, link, ask_every=2.5)", TypeError, "ask_every is 2.5", WHOLE),
    ("flag_time(8, link, hidden_behind=-1.0)", ValueError, "is -1.0", FINITE),
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
    ("factor_payload(size, 0)", ValueError, "got 0", "must be at least 1"),
    ("factor_payload(size, 1.5)", ValueError, "1.5", "must lie in (0, 1]"),
    ("model_size('7B')", TypeError, "is '7B'", "give arrays or jax.ShapeDtypeStruct"),
    ("model_size({'w': 1.5})", TypeError, "is 1.5", "give arrays or jax.ShapeDtype"),
    ("model_size(-1)", ValueError, "parameters is -1", WHOLE),
    ("gradient_payload(7_000)", TypeError, "size is 7000", "give a ModelSize"),
    ("factor_payload(size, 'full')", TypeError, "got 'full'", "must be a plain int"),
]
CASES = calls(KNOWN, _ROWS)
