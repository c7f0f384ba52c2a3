"""A training step as a program, which leaves the state where it was."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _guards, _layout, _memory, _paths
from curvadion_jax.replicas._anchor import check_start
from curvadion_jax.replicas._checks import check_alive, is_array


class CompiledStep:
    """A training step on all replicas, compiled when it is called.

    Once for every way in which a state lies on the devices: a step leaves each array of
    the state divided, within its replica, as it was. Made by
    `curvadion_jax.replicas.step`.

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
        self._programs: dict[Any, Any] = {}
        self._started = False
        self.sent_outside = 0

    def __call__(self, state: Any, batch: Any, *shared: Any) -> tuple[Any, Any]:
        """The state after the step, and the metrics.

        Raises:
          ValueError: as :func:`step` says, or if the state lies on other devices.
        """
        check_alive(state, "state")
        if not self._started:
            check_start(state, has_axis=True)
        program = self._program(state, batch, *shared)
        self._started = True
        return program(state, batch, *shared)

    def lower(self, state: Any, batch: Any, *shared: Any) -> jax.stages.Lowered:
        """The program before it is compiled.

        Args:
          state: arrays, or `jax.ShapeDtypeStruct` with the sharding of the arrays;
            without it this is another program.
          batch: as for a call.
          *shared: as for a call.
        """
        return self._program(state, batch, *shared).lower(state, batch, *shared)

    def _program(self, state: Any, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(state)
        key = structure, tuple(map(self._placement, leaves))
        if key not in self._programs:
            self._check_devices(state)
            program = self._compiled(*key)
            # The trace is kept for the first call.
            self._inspect(program.trace(state, *arguments).jaxpr.jaxpr)
            self._programs[key] = program
        return self._programs[key]

    def _inspect(self, jaxpr: Any) -> None:
        """Rejects what would hang, and names what is sent beside the optimizer."""
        _guards.require_no_deadlock(jaxpr, self._axis_name)
        axis = self._axis_name
        found = _guards.collectives_in(jaxpr, axis, outside=_guards.SCOPE)
        self.sent_outside = sum(
            x.aval.size * x.aval.dtype.itemsize for e in found for x in e.invars
        )
        if found:
            what = ", ".join(
                f"{e.primitive.name} of {e.invars[0].aval.str_short()}" for e in found
            )
            warnings.warn(
                f"the training step itself communicates over {axis!r}, besides the "
                f"optimizer: {what}, {self.sent_outside} bytes a replica and step. "
                "Gradients, losses and norms must stay each replica's own; what is "
                "meant so, as in a contrastive loss, is not counted by metrics.read",
                stacklevel=4,
            )

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

    def _compiled(self, structure, placements: tuple[NamedSharding | None, ...]) -> Any:
        def run(state, batch, *shared):
            with _layout.noting(_divided(state, placements)):
                new, metrics = self._run(state, batch, *shared)
            if jax.tree.structure(new) == structure:
                leaves = zip(
                    jax.tree.leaves(new),
                    jax.tree.leaves(state),
                    placements,
                    strict=True,
                )
                kept = [x if x.shape != y.shape else _keep(x, p) for x, y, p in leaves]
                new = jax.tree.unflatten(structure, kept)
            return new, metrics

        functools.update_wrapper(run, self._function)
        return jax.jit(run, donate_argnums=self._donate)

    def _placement(self, leaf: Any) -> NamedSharding | None:
        """How an array lies on the mesh; None where that is not known."""
        if not is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        placement = leaf.sharding
        if not isinstance(placement, NamedSharding) or placement.mesh != self._mesh:
            return None
        return _over_replicas(placement, self._axis_name)


@functools.lru_cache(maxsize=4096)  # looked up for every array on every step
def _over_replicas(placement: NamedSharding, axis_name: str) -> NamedSharding:
    """Divided over the replicas, whether it is yet or not, and within as it is."""
    spec = [axis_name, *placement.spec[1:]]
    while spec[-1] is None:  # P("replica", None) is P("replica")
        spec.pop()
    return placement.update(spec=P(*spec))


def _divided(state: Any, placements) -> list[_layout.Placed]:
    """How the arrays of the state lie within a replica."""
    leaves = _paths.leaves_with_path(state)
    return [
        _layout.Placed(name, leaf.shape[1:], P(*placement.spec[1:]))
        for (name, leaf), placement in zip(leaves, placements, strict=True)
        if placement is not None
    ]


def _keep(x: jax.Array, placement: NamedSharding | None) -> jax.Array:
    if placement is None or placement.memory_kind == _memory.HOST_KIND:
        return x  # an array in host memory stays by its type
    return lax.with_sharding_constraint(x, placement)
