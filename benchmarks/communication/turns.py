"""A signal of the study beside RMMC: how far the momentum has turned since a sync."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import triggers


def turn(threshold: float) -> triggers.Trigger:
    """Requests a sync when a momentum points elsewhere than after the last one.

    Its value is the largest 1 - cos(m_t, m_sync) over the parameters, in [0, 2], with
    m_t the momentum that this step would have alone and m_sync this replica's own after
    its last sync: infinite on the first step, 0 for a momentum that is zero.

    Args:
        threshold: Value above which it fires.

    Returns:
        The trigger, for optimizers whose momenta are all fields `mu` of their states,
        as those of Muon are, and not Dion's. It remembers m_sync. Replica-varying.

    Raises:
        ValueError: when it is initialised, if there is no such field.
    """

    def init(params, inner_state, views):
        del params, views
        if not (momenta := _momenta(inner_state)):
            raise ValueError("a turn is that of momenta named 'mu', and there are none")
        return momenta

    def decide(seen: triggers.Observation, at_sync: list[jax.Array]):
        now = seen.local_steps == 0
        before = _momenta(seen.inner_state)
        at_sync = [jnp.where(now, x, y) for x, y in zip(before, at_sync, strict=True)]
        after = _momenta(seen.next_inner_state())
        turns = [_turn(x, y) for x, y in zip(after, at_sync, strict=True)]
        value = jnp.where(seen.steps == 0, jnp.inf, jnp.max(jnp.stack(turns)))
        return triggers.decision(~(value <= threshold), value, threshold), at_sync

    return triggers.Trigger(init, decide)


def _momenta(state: Any) -> list[jax.Array]:
    return jax.tree.leaves(
        [value for _, value in optax.tree.get_all_with_path(state, "mu")]
    )


def _turn(new: jax.Array, old: jax.Array) -> jax.Array:
    size = jnp.linalg.norm(new.ravel()) * jnp.linalg.norm(old.ravel())
    cosine = jnp.vdot(new, old) / jnp.where(size == 0, 1, size)
    return jnp.where(size == 0, 0, 1 - cosine)
