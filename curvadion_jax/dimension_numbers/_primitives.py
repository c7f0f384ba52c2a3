"""All primitives of JAX that the reader knows, and the handler of each.

Nothing else is known: a parameter that enters another primitive is asked about. A
primitive that takes numbers to numbers, element by element, is `elementwise`; one that
returns its operands as they are is an `identity`.
"""

from curvadion_jax.dimension_numbers import (
    _arithmetic,
    _control_flow,
    _look_ups,
    _moves,
    _products,
)
from curvadion_jax.dimension_numbers._reader import Handler

_CALLS = """jit pjit closed_call core_call checkpoint remat2 custom_jvp_call
custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call composite shard_map""".split()
_ELEMENTWISE = """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil
clamp complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic
lt max min mul ne neg nextafter not one_minus_square or pow real reduce_precision rem
rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
sinh sqrt square sub tan tanh xor""".split()
_IDENTITIES = """device_put layout_constraint mesh_cast name optimization_barrier pcast
pmax pmin psum psum_invariant pvary reshard sharding_constraint""".split()
_REDUCTIONS = """reduce_and reduce_max reduce_min reduce_or reduce_prod
reduce_sum""".split()

HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_CALLS, _control_flow.call),
    "cond": _control_flow.cond,
    "scan": _control_flow.scan,
    "while": _control_flow.while_loop,
    "dot_general": _products.dot_general,
    "ragged_dot": _products.ragged_dot,
    "ragged_dot_general": _products.ragged_dot,
    "conv_general_dilated": _products.convolution,
    "gather": _look_ups.gather,
    "dynamic_slice": _look_ups.dynamic_slice,
    **dict.fromkeys(_ELEMENTWISE, _arithmetic.elementwise),
    **dict.fromkeys(_REDUCTIONS, _arithmetic.reduce),
    **dict.fromkeys(_IDENTITIES, _arithmetic.identity),
    "stop_gradient": _arithmetic.stop_gradient,
    "transpose": _moves.transpose,
    "reshape": _moves.reshape,
    "squeeze": _moves.squeeze,
    "expand_dims": _moves.squeeze,
    "broadcast_in_dim": _moves.broadcast_in_dim,
    "tile": _moves.tile,
    "slice": _moves.slice_,
    "split": _moves.split,
    "unstack": _moves.unstack,
    "concatenate": _moves.concatenate,
    "stack": _moves.stack,
    "pad": _moves.pad,
    "dynamic_update_slice": _moves.dynamic_update_slice,
    "all_gather": _moves.gathered_parts,
}
