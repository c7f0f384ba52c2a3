"""`optax.contrib.muon`, for matrices that are sharded over several devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _dtypes, _trees
from curvadion_jax.matrices import _two_optimizers
from curvadion_jax.matrices._joined import by_shape
from curvadion_jax.matrices._whole_matrices import by_matrix
from curvadion_jax.mesh import _layout

_NS, _NS_STEPS = (3.4445, -4.7750, 2.0315), 5  # Optax's
_LARGEST_STACK = 2**23  # elements that are joined in one call, and copied for it


def muon(
    learning_rate: optax.ScalarOrSchedule,
    numbers_of: Callable[[Any], Any],
    *,
    beta: optax.ScalarOrSchedule = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices, with the results and defaults of `optax.contrib.muon`.

    In a replica of several devices Optax gathers whole stacks in every Newton-Schulz
    iteration. Here every device gets whole matrices once, and iterates alone.
    `numbers_of` is a function from a masked tree of the parameters to the dimension
    numbers of its leaves.
    """
    return optax.chain(
        _arguments.with_schedule(lambda beta: _nesterov(beta, mu_dtype), beta),
        _orthogonalized(numbers_of, eps),
        _arguments.decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _nesterov(
    beta: jax.typing.ArrayLike, mu_dtype: jax.typing.DTypeLike | None
) -> optax.GradientTransformation:
    """Replaces gradients by the momentum of `optax.contrib.scale_by_muon`."""

    def init_fn(params):
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        zero = jnp.zeros([], jnp.int32)
        # Without the coefficients of the iterations, which are constants here.
        nothing: Any = ()
        return optax.contrib.MuonState(count=zero, mu=mu, ns_coeffs=nothing)

    def update_fn(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        # Nesterov: the next step's gradient is taken to be this one's.
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        mu_hat = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return mu_hat, state._replace(count=count, mu=optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformation(init_fn, update_fn)


def _orthogonalized(
    numbers_of: Callable[[Any], Any], eps: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalizes by Newton-Schulz iterations, and scales by width."""

    def update_fn(
        updates, state, params=None, *, layout=_layout.ONE_DEVICE, **extra_args
    ):
        del params, extra_args
        views = _two_optimizers.matrices_only(updates, numbers_of)

        def scaled(stack):
            fan_in, fan_out = stack.shape[-2:]
            return math.sqrt(max(1.0, fan_out / fan_in)) * _newton_schulz(stack, eps)

        def orthogonalize(stacks):
            if layout.is_divided:  # What the compiler divides stays as it lies.
                return [scaled(stack) for stack in stacks]
            return by_shape(scaled, stacks, largest=_LARGEST_STACK)

        arrays = dict(_trees.leaves_with_path(updates))
        # Even with half of the devices idle: else each iteration gathers all matrices.
        found = by_matrix(orthogonalize, arrays, views, layout, fewest=0.5)
        return _trees.map_with_path(lambda path, _: found[path], updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update_fn)


def _newton_schulz(x: jax.Array, eps: jax.typing.ArrayLike) -> jax.Array:
    """Orthogonalizes every matrix of a stack, as `optax.contrib.scale_by_muon` does.

    The loop is not unrolled: that would take five times as long to compile.
    """
    # Squares of what float16 holds may not fit into float16.
    wide = _dtypes.at_least_float32(x)
    norm = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    x = (wide / (norm + eps)).astype(x.dtype)
    is_wide = x.shape[-2] <= x.shape[-1]

    def iteration(_, x):
        # The smaller Gram matrix. (Optax transposes tall matrices in place of this, and
        # compilers for TPUs then transpose momenta, gradients and parameters too.)
        gram = x @ x.mT if is_wide else x.mT @ x
        factor = _NS[1] * gram + _NS[2] * gram @ gram
        return _NS[0] * x + (factor @ x if is_wide else x @ factor)

    return jax.lax.fori_loop(0, _NS_STEPS, iteration, x)
