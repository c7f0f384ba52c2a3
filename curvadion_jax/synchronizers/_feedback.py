"""Compressed means with error feedback, as synchronizers use them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _finite
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax.compressors import Compressor


def zero_residual(params: optax.Params, dtype: Any = None) -> Any:
    """Zeros like the parameters; None is at least float32."""
    return jax.tree.map(
        lambda x: jnp.zeros_like(x, dtype or compute_dtype(x.dtype)), params
    )


def mean_with_feedback(
    compressor: Compressor,
    tree: Any,
    residual: Any,
    local: LocalStep,
    group: Group,
) -> tuple[Any, Any]:
    """Mean in a compressor's form of replicas' arrays and residuals.

    Residuals belong to arrays times their weight: what a replica did not send at one
    weight it sends in full at any other. A replica that takes no part contributes its
    residual alone, so the old residual need not be kept with the new one. The mean is
    over all who are expected, and not over those who are there: else the drift of a
    replica that takes part every second time would count twice.

    Args:
      compressor: see `Compressor`.
      tree: arrays of this replica.
      residual: what of earlier ones it has not sent.
      local: its part in the sync.
      group: the replicas.

    Returns:
      The mean and the residual.
    """
    whole = jax.tree.map(
        lambda x, r: x * jnp.asarray(local.expected, x.dtype) + r,
        local.weighted(tree),
        local.if_healthy(residual),
    )
    result = compressor.average(whole, group)
    unsent = jax.tree.map(lambda new, r: new.astype(r.dtype), result.unsent, residual)
    return result.mean, unsent


def with_absent(local: LocalStep, residual: Any, gradients: Any) -> Any:
    """The residual after a mean of gradients, which are there for one step only.

    A replica that is absent adds its own.
    """
    later = _finite.or_zeros(~local.present, gradients)
    return jax.tree.map(lambda r, x: r + x.astype(r.dtype), residual, later)
