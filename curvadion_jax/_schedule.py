"""When the coming syncs are due, worked out on the host.

A trigger that looks at counters alone needs nobody's answer: `replicas.step` asks it
here, before the step, for many steps at once.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from curvadion_jax import _counters, _paths
from curvadion_jax._protocols import Observation, Trigger
from curvadion_jax.triggers._base import check_answer

COUNTERS = ("steps", "syncs", "local_steps")
# Steps that are worked out at once, so that a step takes no longer for it.
_STEPS = 64


class Due(NamedTuple):
    """What happens on a step, where the host knows it.

    Attributes:
      sync: whether a sync begins, and ends if it has no delay.
      ends: of syncs with a delay 0, or 1 + the variant of the one that ends.
    """

    sync: bool
    ends: int = 0


LOCAL = Due(sync=False)


class Schedule(NamedTuple):
    """A trigger that looks at counters alone, and what it is given besides.

    Attributes:
      trigger: one with `scheduled`.
      state: its state, as shapes and dtypes.
      sync_cost: see `Observation`.
      delay: of the synchronizer, as `cycle`.
    """

    trigger: Trigger
    state: Any
    sync_cost: float
    delay: int = 0
    cycle: tuple[int, ...] = (0,)


def ending(syncs, local_steps, delay: int, cycle: tuple[int, ...]) -> Any:
    """What becomes of a sync that has begun before this step.

    Args:
      syncs: int32[], that have begun.
      local_steps: int32[], steps since the last of them.
      delay: of the synchronizer, as `cycle`.

    Returns:
      int32[], 0 or 1 + the variant of the sync that ends on this step; and bool[],
      whether one goes on after it, so that none can begin.
    """
    variant = jnp.array(cycle, jnp.int32)[(syncs - 1) % len(cycle)]
    ends = (syncs > 0) & (local_steps == delay - 1)
    return jnp.where(ends, 1 + variant, 0), (syncs > 0) & (local_steps < delay - 1)


class Upcoming:
    """Says what is due on the coming steps of a training state.

    It counts along with the states that the step returns, and reads the counters from
    the devices only when it is given another state.

    Args:
      schedule: that of the only optimizer in the state.
      places: of the counters and the trigger's state among the leaves of the state.
    """

    def __init__(self, schedule: Schedule, places: Sequence[int]):
        self._places = places
        self._structure = jax.tree.structure(schedule.state)
        self._look_ahead = jax.jit(functools.partial(_look_ahead, schedule))
        self._seen: list[Any] = []  # the counters of the state that is looked at
        self._due: list[Due] = []
        self._following: Any = None

    def due(self, state: Any, steps: int = 1) -> tuple[Due, ...]:
        """What is due on each of the steps that follow this state."""
        counters = self._counters(state)
        same = map(operator.is_, counters, self._seen)
        if len(self._seen) != len(counters) or not all(same):
            self._seen, self._due = counters, []
            self._following = self._read(counters)
        while len(self._due) < steps:
            # Apart from the mesh that a caller has set.
            with jax.set_mesh(Mesh(np.array([_host()]), ("host",))):
                due, self._following = self._look_ahead(*self._following)
            both = zip(*(np.asarray(x).tolist() for x in due), strict=True)
            self._due += itertools.starmap(Due, both)
        return tuple(self._due[:steps])

    def took(self, state: Any, steps: int = 1) -> None:
        """Counts steps, the last of which returned this state."""
        self._seen, self._due = self._counters(state), self._due[steps:]

    def _counters(self, state: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(state)
        return [leaves[place] for place in self._places]

    def _read(self, stacked: Sequence[jax.Array]) -> Any:
        # Equal on all replicas: the first row that is here is everybody's.
        here = lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x  # noqa: E731
        rows = jax.device_get([here(x) for x in stacked])
        own = jax.device_put([row[0] for row in rows], _host())
        counters, of_trigger = own[: len(COUNTERS)], own[len(COUNTERS) :]
        return counters, jax.tree.unflatten(self._structure, of_trigger)


def _look_ahead(schedule: Schedule, counters: Any, trigger_state: Any):
    """What is due on each of the coming steps, and what follows them."""

    def one_step(carry, _):
        (steps, syncs, local_steps), state = carry
        seen = Observation(
            steps=steps,
            syncs=syncs,
            local_steps=local_steps,
            sync_cost=schedule.sync_cost,
        )
        decision, state = check_answer(schedule.trigger.decide(seen, state), state)
        ends, goes_on = ending(syncs, local_steps, schedule.delay, schedule.cycle)
        fire = decision.fire & ~goes_on
        local_steps = jnp.where(fire, 0, local_steps + 1)
        return ([steps + 1, syncs + fire, local_steps], state), (fire, ends)

    following, due = lax.scan(one_step, (counters, trigger_state), length=_STEPS)
    return due, following


def places(schedule: Schedule, state: Any) -> list[int] | None:
    """Where the counters and the trigger's state are; None if that is not clear.

    By names, since a framework may keep the state in its own classes.
    """
    index = {names: i for i, (names, _) in enumerate(_paths.leaves_with_names(state))}
    found = _counters.optimizers(index)
    if len(found) != 1:
        return None
    (before,) = found
    of_trigger = _paths.leaves_with_names(schedule.state)
    wanted = [
        *((*before, "metrics", counter) for counter in COUNTERS),
        *((*before, "trigger_state", *names) for names, _ in of_trigger),
    ]
    return [index[names] for names in wanted] if set(wanted) <= set(index) else None


def _host() -> Any:
    """A device whose queue no training step fills, if there is one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return jax.local_devices()[0]
