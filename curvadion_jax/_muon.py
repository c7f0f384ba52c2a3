"""Muon's steps, as Optax takes them, for matrices that lie on several devices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _partition, _paths
from curvadion_jax._within_replica import Devices

EPSILON = 1e-7  # 1e-8 is zero in float16


def muon(
    learning_rate: optax.ScalarOrSchedule,
    dimension_numbers: Any,
    *,
    beta: optax.ScalarOrSchedule = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """What `optax.contrib.muon` does with matrices.

    The compiler divides its Newton-Schulz iterations within each product: inside a
    replica of several devices every iteration gathers whole stacks. Here every device
    gets whole matrices once, and iterates alone.

    Args:
      learning_rate: a number or a schedule.
      dimension_numbers: function from a masked tree of the parameters to the dimension
        numbers of its leaves.
      beta: decay rate of the Nesterov momentum; a number or a schedule.
      eps: of the norm by which a matrix is divided.
      weight_decay: as for `optax.contrib.muon`.
      weight_decay_mask: as for `optax.contrib.muon`.
      mu_dtype: dtype of the momentum.
    """

    def momentum(beta):
        # No iteration, and a scaling that belongs to the first: Nesterov momentum.
        return optax.contrib.scale_by_muon(
            ns_steps=0,
            beta=beta,
            mu_dtype=mu_dtype,
            preconditioning="aol",
            weight_dimension_numbers=dimension_numbers,
        )

    return optax.chain(
        optax.inject_hyperparams(momentum)(beta) if callable(beta) else momentum(beta),
        _orthogonalized(dimension_numbers, eps),
        # It takes schedules.
        optax.add_decayed_weights(weight_decay, weight_decay_mask),  # pyright: ignore[reportArgumentType]
        optax.scale_by_learning_rate(learning_rate),
    )


def muon_adamw(
    learning_rate: optax.ScalarOrSchedule,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """What `optax.contrib.muon` does with all else, with b2 = 0.95."""
    return optax.adamw(
        learning_rate,
        b1=0.9,
        b2=0.95,
        eps=eps,
        weight_decay=0.0,
        mu_dtype=mu_dtype,
        nesterov=True,
    )


def _orthogonalized(
    dimension_numbers: Any, eps: jax.typing.ArrayLike
) -> optax.GradientTransformationExtraArgs:
    """Newton-Schulz iterations, and Muon's scale by width."""

    def orthogonalized(stack):
        numbers = optax.contrib.MuonDimensionNumbers(
            stack.fan_in_axes, stack.fan_out_axes
        )
        # Without momentum: of an average of one.
        once = optax.contrib.scale_by_muon(
            beta=0.0, eps=eps, nesterov=False, weight_dimension_numbers=numbers
        )
        result, _ = once.update(stack.array, once.init(stack.array))
        return jnp.asarray(result)

    def update_fn(updates, state, params=None, *, devices=None, **extra_args):
        del params, extra_args
        devices = Devices() if devices is None else devices
        views = {
            path: view
            for path, view in _partition.matrix_views(
                updates, dimension_numbers
            ).items()
            if view is not None
        }
        found = devices.by_matrix(
            # Each alone: momenta are as large as the model, and joined they are copied.
            lambda stacks: [orthogonalized(stack) for stack in stacks],
            dict(_paths.leaves_with_path(updates)),
            views,
            # The compiler gathers all matrices in each iteration.
            fewest=0.5,
        )

        def scaled(path, _):
            ratio = views[path].fan_out / views[path].fan_in
            return jnp.sqrt(jnp.maximum(1, ratio)) * found[path]

        return _paths.map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update_fn)
