"""The two kinds of synchronizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from curvadion_jax.compressors import Payload
from curvadion_jax.mesh._group import Group as Group
from curvadion_jax.mesh._group import Part as Part
from curvadion_jax.mesh._layout import Layout


def _nothing(*_: Any) -> Any:
    return ()


class AfterStep(NamedTuple):
    """A sync that follows every replica's own step, and ends in common parameters.

    All functions are of one replica. The optimizer sees to it that an absent replica
    goes to the new anchor and keeps its drift on top, that nothing changes if no
    replica takes part, and that dtypes stay.

    Attributes:
      sync: (moved, anchor, state, residual, part) -> (target, anchor, state,
        residual). `moved` are this replica's parameters after its own step, `target`
        those that it shall have, and `anchor` and `state` must come out the same on
        all replicas: make them of common values and of means. `part` is a
        :class:`Part`. The residual of an excluded replica comes as zeros.
      payload: (parameters, inner state, `Layout`) -> the `Payload` of one sync (see
        `curvadion_jax.compressors`), from shapes.
      init_state: anchor -> `state`, what else is the same on all replicas.
      init_residual: anchor -> `residual`, what a replica has not sent yet.

    Example:
      >>> from curvadion_jax.compressors import exact
      >>> def sync(moved, anchor, state, residual, part):
      ...     drift = jax.tree.map(jax.numpy.subtract, moved, anchor)
      ...     mean = part.mean(drift)  # absent replicas add theirs later
      ...     share = part.share_present
      ...     anchor = jax.tree.map(lambda a, d: a + share * d, anchor, mean)
      ...     return anchor, anchor, state, residual
      >>> average = AfterStep(
      ...     sync, payload=lambda x, _, layout: exact().payload_by_device(x, layout)
      ... )
    """

    sync: Callable[..., tuple[Any, Any, Any, Any]]
    payload: Callable[[Any, Any, Layout], Payload]
    init_state: Callable[[Any], Any] = _nothing
    init_residual: Callable[[Any], Any] = _nothing


class WithinStep(NamedTuple):
    """A sync that replaces every replica's own step, such as a mean of gradients.

    It keeps equal replicas equal, and does not make others equal. The optimizer sees to
    it that nothing changes if no replica takes part.

    Attributes:
      sync: (take, gradients, inner state, state, residual, part) -> (updates, inner
        state, state, residual), with ``take(gradients, inner_state, **extra)`` ->
        (updates, inner state), the inner optimizer's update.
      payload: as for :class:`AfterStep`.
      init_state: inner state -> `state`, what is the same on all replicas.
      init_residual: parameters -> `residual`, what a replica has not sent yet.

    Example:
      >>> from curvadion_jax.compressors import exact
      >>> def sync(take, gradients, inner_state, state, residual, part):
      ...     signs = jax.tree.map(jax.numpy.sign, gradients)
      ...     return *take(part.mean(signs), inner_state), state, residual
      >>> average_signs = WithinStep(
      ...     sync, payload=lambda x, _, layout: exact().payload_by_device(x, layout)
      ... )
    """

    sync: Callable[..., tuple[Any, Any, Any, Any]]
    payload: Callable[[Any, Any, Layout], Payload]
    init_state: Callable[[Any], Any] = _nothing
    init_residual: Callable[[Any], Any] = _nothing


Synchronizer = AfterStep | WithinStep
