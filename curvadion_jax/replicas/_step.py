"""Compiles a user's training step for all replicas."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from curvadion_jax import _layout, _mapped, _paths
from curvadion_jax.replicas import _arrays
from curvadion_jax.replicas._consistency import ConsistencyCheck
from curvadion_jax.replicas._map import map_over_replicas
from curvadion_jax.replicas._mesh import AXIS, check_mesh
from curvadion_jax.replicas._stray_collectives import between_replicas


def step(
    function: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    *,
    axis_name: str = AXIS,
    donate: bool = True,
    average: Sequence[str] = (),
    local: Sequence[str] = (),
) -> "CompiledStep":
    """Runs your training step on every replica.

    A step written for a data-parallel `jit` runs unchanged: `jax.vmap` maps it over the
    leading axis of the state, so its gradients are a replica's own. The optimizer
    inside, built with `axis_name`, communicates. ``jax.lax.axis_index(axis_name)`` is
    the replica's number; fold it into keys for dropout, which all share otherwise.

    Warns if the step or the compiler adds communication between replicas, or if
    replicas still differ after a sync.

    Args:
      function: ``(state, batch, *shared)`` -> (state, metrics) of one replica, without
        a replica axis. No `pmean`, neither of gradients nor of the loss.
      mesh: mesh with the replica axis, of type Auto (`make_mesh`).
      axis_name: name of the replica axis.
      donate: whether the state's buffers are reused; the state passed in is then gone.
      average: names or paths, such as ("batch_stats",), of floating-point arrays not
        of the optimizer, averaged at every sync in float32 and with its weights (of
        several syncs, the largest). Replicas that it excludes, or whose arrays are not
        finite, do not count.
      local: names or paths of arrays that are meant to differ between replicas, such as
        metrics; no warning names them.

    Returns:
      A compiled function ``(state, batch, *shared)`` -> (state, metrics). The state has
      a leading replica axis (`replicate`), and comes back sharded as it came. The batch
      has none: its arrays [global batch, ...] are divided over the replicas. All get
      the same `shared`. The metrics come back with a replica axis, not averaged.

    Raises:
      TypeError: when called, if the function does not return a pair.
      ValueError: if the mesh has no such axis; when called, if state or batch do not
        fit the replicas, gradients were averaged, or the optimizer never synchronises.

    Example:
      >>> from curvadion_jax.replicas import make_mesh, replicate
      >>> def count(state, batch):
      ...     return state + batch.sum(), {"sum": batch.sum()}
      >>> mesh = make_mesh(1)
      >>> state, metrics = step(count, mesh)(replicate(0.0, mesh), jnp.ones(4))
      >>> metrics["sum"].tolist()
      [4.0]
    """
    check_mesh(mesh, axis_name)
    return CompiledStep(function, mesh, axis_name, donate, average, local)


@dataclasses.dataclass(eq=False, repr=False)
class CompiledStep:
    """A training step on all replicas, compiled when it is called.

    It is compiled for every sharding of a state; and twice, without a decision and with
    one, if the host knows whether one is due.
    """

    _function: Callable[..., Any]
    _mesh: Mesh
    _axis_name: str
    _donate: bool
    _average: Sequence[str]
    _local: Sequence[str]

    def __post_init__(self):
        functools.update_wrapper(self, self._function, updated=())
        self._programs: dict[Any, tuple[Any, _mapped.MappedStep]] = {}  # by key and due
        self._schedules: dict[Any, _Schedule] = {}  # by key
        self._count = _StepCount()
        self._check = ConsistencyCheck(self._local)

    def __call__(self, state: Any, batch: Any, *shared: Any) -> tuple[Any, Any]:
        """The state after the step, and the metrics; see :func:`step`."""
        operands = (state, batch, *shared)
        everything = jax.tree.leaves(operands)
        key = self._key(*operands)
        if any(isinstance(x, Tracer) for x in everything):
            program, mapped = self._program(key, None)
            results = program(*operands)
            _warn_of_collectives(mapped)
            return results
        if self._donate and len(set(map(id, everything))) < len(everything):
            state, *_ = operands = _without_aliases(operands)
        leaves, structure = jax.tree.flatten(state)

        # 1. The host looks up what it knows of steps with such arrays. A step may do
        # something else for batches of another shape, such as evaluate.
        is_first = key not in self._schedules
        schedule = self._schedule(key, operands) if is_first else self._schedules[key]

        # 2. A state that comes from no step is checked. Is a decision due?
        counter = None if schedule.counter is None else leaves[schedule.counter]
        if is_first or self._count.may_be_initial(counter):
            self._check.at_start(state, schedule.step)
        due = schedule.due_of and schedule.due_of(self._count.read(counter))

        # 3. The step. Its program is inspected once.
        program, mapped = self._program(key, due)
        if is_first:
            lowered = program.lower(*operands)  # JAX keeps it for the call.
            _warn_of_collectives(mapped)
            self._warn_of_xla(lowered)
            self._schedules[key] = schedule
        new, metrics = program(*operands)

        # 4. The step is counted, and after syncs replicas are compared.
        leaves, new_structure = jax.tree.flatten(new)
        if schedule.counter is not None and new_structure == structure:
            is_one_step = schedule.due_of is not None
            self._count.advance(leaves[schedule.counter], is_one_step)
        self._check.after_step(new, due)
        return new, metrics

    def lower(
        self, state: Any, batch: Any, *shared: Any, due: bool | None = None
    ) -> jax.stages.Lowered:
        """Lowers the program of a step.

        Arrays may be `jax.ShapeDtypeStruct` with a sharding. If the host knows whether
        a decision is due, True or False choose the program of such a step; else None.
        """
        program, mapped = self._program(self._key(state, batch, *shared), due)
        lowered = program.lower(state, batch, *shared)
        _warn_of_collectives(mapped)
        return lowered

    def _key(self, state: Any, *others: Any) -> Any:
        """What the program depends on; of each, one `MappedStep` is traced, once."""
        leaves, structure = jax.tree.flatten(state)
        places = (_arrays.placement(x, self._mesh, self._axis_name) for x in leaves)
        arrays, others_structure = jax.tree.flatten(others)
        types = map(jax.typeof, [*leaves, *arrays])
        return structure, tuple(places), others_structure, tuple(types)

    def _schedule(self, key, operands) -> "_Schedule":
        """Traces a step to learn how the host can know whether a decision is due.

        As if none were: if the trigger cannot say, that program is the only one.
        """
        program, mapped = self._program(key, False)
        program.trace(*operands)
        if mapped.due_of is None:
            mapped.due = None
            self._programs[key, None] = self._programs.pop((key, False))
        # By names, since a framework may keep the state in its own classes.
        names = [names for names, _ in _paths.leaves_with_names(operands[0])]
        counters = [names.index(each) for each in mapped.counters if each in names]
        is_known = mapped.updates == 1 and len(counters) == 1
        counter = counters[0] if counters else None
        due_of = mapped.due_of if is_known else None
        return _Schedule(counter, due_of, mapped)

    def _program(self, key, due: bool | None) -> tuple[Any, _mapped.MappedStep]:
        """The jitted step, and what was found when it was traced."""
        found = self._programs.get((key, due))
        if found is None:
            mapped = _mapped.MappedStep(self._mesh, self._axis_name, due=due)
            found = self._programs[key, due] = self._jitted(key, mapped), mapped
        return found

    def _jitted(self, key, mapped: _mapped.MappedStep) -> Any:
        structure, placements, *_ = key
        function = map_over_replicas(self._function, mapped, self._average, self._local)

        def run(state, batch, *shared):
            replicas = self._mesh.shape[self._axis_name]
            _arrays.count_replicas(state, "state", expected=replicas)
            leaves = [*map(_layout.constrain, jax.tree.leaves(state), placements)]
            state = jax.tree.unflatten(structure, leaves)
            mapped.placed = _arrays.within_replica(state, placements)
            with _mapped.mapping(mapped):
                new, metrics = function(state, batch, *shared)
            if jax.tree.structure(new) == structure:
                triples = zip(jax.tree.leaves(new), leaves, placements, strict=True)
                new = [
                    _layout.constrain(x, place) if x.shape == old.shape else x
                    for x, old, place in triples
                ]
                new = jax.tree.unflatten(structure, new)
            return new, metrics

        functools.update_wrapper(run, self._function)
        return jax.jit(run, donate_argnums=(0,) if self._donate else ())

    def _warn_of_xla(self, lowered: jax.stages.Lowered) -> None:
        """Warns of what the compiler has added to a program."""
        if self._mesh.shape[self._axis_name] == 1:
            return
        text = lowered.compile().as_text() or ""
        if sent := between_replicas(text, self._mesh, self._axis_name):
            warnings.warn(
                "XLA added communication between replicas outside the optimizer, so "
                "every step waits for the slow link: "
                f"{'; '.join(sent[:4])}{' ...' if len(sent) > 4 else ''}. Constrain "
                "the sharding of the array that is read; in place of jax.debug return "
                "metrics.",
                stacklevel=3,
            )


def _warn_of_collectives(mapped: _mapped.MappedStep) -> None:
    """Warns of what the user's step sends itself."""
    if mapped.communicates:
        warnings.warn(
            f"The training step itself communicates over {mapped.axis_name!r}, besides "
            f"the optimizer: {mapped.communicates}. Keep gradients, losses and norms "
            "each replica's own; metrics.read does not count this.",
            stacklevel=3,
        )


def _without_aliases(operands: Any) -> Any:
    """Copies arrays that the operands hold twice.

    XLA ends the process if a donated buffer is given twice (JAX 0.10.2).
    """
    seen: set[int] = set()

    def unique(x):
        is_alias = id(x) in seen
        seen.add(id(x))
        return jnp.copy(x) if is_alias and isinstance(x, jax.Array) else x

    return jax.tree.map(unique, operands)


class _Schedule(NamedTuple):
    """What the host knows of steps with such arrays."""

    counter: int | None  # which leaf of the state counts the steps of an optimizer
    due_of: Callable[[int], bool] | None  # of `MappedStep`; None if devices decide
    step: _mapped.MappedStep


class _StepCount:
    """The number of steps taken, known on the host without waiting for a step.

    A counter is read from the devices where the last call did not return it.
    """

    def __init__(self) -> None:
        self._counter: Any = None  # in the state that was returned, or read, last
        self._steps: int | None = None  # what it holds; None if that was not read

    def read(self, counter: Any) -> int:
        """The steps that a counter has counted."""
        if counter is not self._counter or self._steps is None:
            # Equal on all replicas: the first row of this process will do.
            row = getattr(counter, "addressable_data", lambda _: counter)(0)
            self._counter, self._steps = counter, int(np.ravel(row)[0])
        return self._steps

    def may_be_initial(self, counter: Any) -> bool:
        """Whether a state is one before the first step, and no call returned it."""
        is_foreign = counter is not None and counter is not self._counter
        return is_foreign and self.read(counter) == 0

    def advance(self, returned: Any, is_one_step: bool) -> None:
        """Notes the counter that a call returned; `is_one_step` if it took just one."""
        if self._steps is not None:
            self._steps = self._steps + 1 if is_one_step else None
        self._counter = returned
