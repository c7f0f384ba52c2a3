"""A training step as a program, which leaves the state where it was."""

import functools
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _layout, _mapped
from curvadion_jax._schedule import LOCAL, Due, Upcoming, places
from curvadion_jax.replicas import _placed, _traffic
from curvadion_jax.replicas._behind import Look
from curvadion_jax.replicas._checks import check_alive, is_array
from curvadion_jax.replicas._mesh import check_context
from curvadion_jax.replicas._start import check_start

_log = logging.getLogger("curvadion_jax")


class _Program(NamedTuple):
    """A jitted step, and what was seen of it when it was traced."""

    jitted: Any
    mapped: _mapped.Mapped

    def upcoming(self, state: Any) -> Upcoming | None:
        """What knows when syncs are due, where the host can."""
        schedule = self.mapped.schedule
        if schedule is None or not self.mapped.counts_along:
            return None
        found = places(schedule, state)
        return None if found is None else Upcoming(schedule, found)


class CompiledStep:
    """A training step on all replicas, compiled when it is called.

    Once for every way in which a state lies on the devices: a step leaves each array of
    the state divided, within its replica, as it was. Where the optimizer's trigger
    looks at counters alone there are two programs, of a local step and of a sync step,
    and the host knows which is due. Made by `curvadion_jax.replicas.step`.

    Attributes:
      sent_outside: bytes that the step itself sends over the replica axis beside the
        optimizer, of which a warning was given; known when it was first called.

    Args:
      function: the training step of one replica.
      run: the same for the state of all replicas.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.
      donate: whether the state's buffers are reused.

    Example:
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.make_mesh(1)
      >>> step = replicas.step(lambda state, batch: (state + 1, {}), mesh)
      >>> state = replicas.replicate(jax.numpy.zeros(2), mesh)
      >>> step.lower(state, jax.numpy.ones(1)).compile().memory_analysis() is None
      False
    """

    def __init__(
        self,
        function: Callable[..., Any],
        run: Callable[..., Any],
        mesh: Mesh,
        axis_name: str,
        donate: bool,
    ):
        functools.update_wrapper(self, function, updated=())
        self._function, self._run = function, run
        self._mesh, self._axis_name = mesh, axis_name
        self._donate = (0,) if donate else ()
        self._programs: dict[Any, _Program] = {}
        self._checked: set[Any] = set()
        self._upcoming: dict[Any, Upcoming | None] = {}
        self._behind = Look()

    @property
    def sent_outside(self) -> int:
        programs = self._programs.values()
        return max((program.mapped.sent_outside for program in programs), default=0)

    def __call__(self, state: Any, batch: Any, *shared: Any) -> tuple[Any, Any]:
        """The state after the step, and the metrics.

        Raises:
          ValueError: as :func:`step` says, or if the state lies on other devices.
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, batch, shared))):
            program = self._program(self._key(state), state, None)
            return program.jitted(state, batch, *shared)
        check_alive(state, "state")
        key, given = self._key(state), state
        leaves = map(_placed.without_empty_axes, jax.tree.leaves(state), key[1])
        state = jax.tree.unflatten(key[0], leaves)
        batch = jax.tree.map(self._divided, batch)
        if not self._checked:
            check_context(self._mesh)
            check_start(state, has_axis=True)
        operands = (state, batch, *shared)
        start = time.perf_counter()
        due = self._due(key, operands, given)
        program = self._program(key, state, due).jitted
        if (key, due) not in self._checked:
            # The executable is kept for the call.
            name = f"{getattr(self, '__name__', 'step')} ({self._told(due)})"
            _log.info("compiling %s for %s", name, dict(self._mesh.shape))
            compiled = program.lower(*operands).compile()
            _log.info("compiled %s in %.1f s", name, time.perf_counter() - start)
            self._check_traffic(compiled.as_text() or "")
            self._checked.add((key, due))
        new, metrics = program(*operands)
        upcoming = self._upcoming[key]
        if upcoming and jax.tree.structure(new) == key[0]:
            upcoming.took(new, self._steps(operands[1:]))
        self._behind.after(new, due)
        return new, metrics

    def trace(
        self, state: Any, batch: Any, *shared: Any, sync: bool | None = None
    ) -> jax.stages.Traced:
        """The program, to look at: ``trace(...).jaxpr``, ``trace(...).lower()``.

        Args:
          state: arrays, or `jax.ShapeDtypeStruct` with the sharding of the arrays;
            without it this is another program.
          batch: as for a call.
          *shared: as for a call.
          sync: for a trigger that looks at counters alone, True for the program of a
            sync step and False for that of a local step, which are those that are run.
            None is the one program of both, with a condition, of other triggers.

        Raises:
          ValueError: if `sync` is given, and the host cannot know it.
        """
        due = None if sync is None else Due(sync)
        return self._traced(state, batch, shared, due)

    def lower(
        self, state: Any, batch: Any, *shared: Any, sync: bool | None = None
    ) -> jax.stages.Lowered:
        """The program before it is compiled; with the arguments of `trace`."""
        return self.trace(state, batch, *shared, sync=sync).lower()

    def _traced(self, state: Any, batch: Any, shared: Any, due: Any) -> Any:
        program = self._program(self._key(state), state, due)
        traced = program.jitted.trace(state, batch, *shared)
        if due is not None and program.mapped.schedule is None:
            raise ValueError(
                "when a sync is due is known only of an optimizer whose trigger looks "
                "at counters alone, such as local_muon; here the program decides: "
                "leave it out"
            )
        return traced

    def _due(self, key, operands, state: Any) -> Any:
        """What is due in this program; None where the program decides it.

        By the state as it was given, which is known again by its arrays.
        """
        steps = self._steps(operands[1:])
        if key not in self._upcoming:
            local = self._known(steps * (LOCAL,))
            program = self._program(key, state, local)
            program.jitted.trace(*operands)
            self._upcoming[key] = program.upcoming(state)
            if program.mapped.schedule is None:  # it has a condition
                program.mapped.due = None  # for any number of steps
                self._programs[key, None] = self._programs.pop((key, local))
        upcoming = self._upcoming[key]
        return upcoming and self._known(upcoming.due(state, steps))

    # What a program of several steps has otherwise.

    def _steps(self, batches: Any) -> int:
        """How many steps a program takes, of a batch and what is shared."""
        del batches
        return 1

    def _known(self, due: tuple[Due, ...]) -> Any:
        """What is due on the steps of a program, as it is known by."""
        return due[0]

    def _told(self, due: Any) -> str:
        return "step" if due is None else f"{'sync' if any(due) else 'local'} step"

    def _program(self, key, state: Any, due: Any) -> "_Program":
        if (key, due) not in self._programs:
            self._check_devices(state)
            mapped = _mapped.Mapped(
                self._mesh, self._axis_name, due, is_another=bool(self._programs)
            )
            program = _Program(self._jitted(key, mapped), mapped)
            self._programs[key, due] = program
        return self._programs[key, due]

    def _check_traffic(self, text: str) -> None:
        """Warns where replicas wait for each other outside of the optimizer."""
        if self._mesh.shape[self._axis_name] == 1 or self.sent_outside:
            return
        if sent := _traffic.between_replicas(text, self._mesh, self._axis_name):
            warnings.warn(
                "the compiler has replicas wait for each other on every step, in the "
                f"training step and not in the optimizer: {'; '.join(sent[:4])}"
                f"{' ...' if len(sent) > 4 else ''}. Say there how rows are divided "
                "within a replica: x = jax.lax.with_sharding_constraint(x, "
                "NamedSharding(mesh, PartitionSpec('fsdp'))), with your axis, on the "
                "array that is read",
                stacklevel=3,
            )

    def _key(self, state: Any) -> Any:
        leaves, structure = jax.tree.flatten(state)
        return structure, tuple(map(self._placement, leaves))

    def _check_devices(self, state: Any) -> None:
        wanted = set(self._mesh.devices.flat)
        for path, leaf in jax.tree.leaves_with_path(state):
            placement = leaf.sharding if is_array(leaf) else None
            if not isinstance(placement, NamedSharding) or placement.mesh == self._mesh:
                continue
            if placement.device_set != wanted:
                raise ValueError(
                    f"the state{jax.tree_util.keystr(path)} lies on the mesh "
                    f"{dict(placement.mesh.shape)} and the step is for "
                    f"{dict(self._mesh.shape)}, of other devices: replicate or restore "
                    "the state onto the mesh of the step"
                )

    def _jitted(self, key, mapped: _mapped.Mapped) -> Any:
        structure, placements = key

        def run(state, batch, *shared):
            leaves = jax.tree.leaves(state)
            leaves = [
                _placed.keep(x, p) for x, p in zip(leaves, placements, strict=True)
            ]
            state = jax.tree.unflatten(structure, leaves)
            with (
                _layout.noting(_placed.divided(state, placements)),
                _mapped.mapping(mapped),
            ):
                new, metrics = self._run(state, batch, *shared)
            if jax.tree.structure(new) == structure:
                triples = zip(jax.tree.leaves(new), leaves, placements, strict=True)
                kept = [
                    x if x.shape != y.shape else _placed.keep(x, p)
                    for x, y, p in triples
                ]
                new = jax.tree.unflatten(structure, kept)
            return new, metrics

        functools.update_wrapper(run, self._function)
        return jax.jit(run, donate_argnums=self._donate)

    def _divided(self, leaf: Any, axis: int = 0) -> Any:
        """What has no place yet, divided over the replicas along this axis.

        Else the compiler chooses one, and may have replicas exchange rows.
        """
        if (is_array(leaf) and leaf.committed) or jax.process_count() > 1:
            return leaf
        rows = np.shape(leaf)[axis : axis + 1]
        if not rows or rows[0] % self._mesh.shape[self._axis_name]:
            return leaf  # rejected when traced
        spec = P(*[None] * axis, self._axis_name)
        return jax.device_put(leaf, NamedSharding(self._mesh, spec))

    def _placement(self, leaf: Any) -> NamedSharding | None:
        """How an array lies on the mesh; None where that is not known."""
        if not is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        placement = leaf.sharding
        if not isinstance(placement, NamedSharding) or placement.mesh != self._mesh:
            return None
        return _placed.over_replicas(placement, self._axis_name)
