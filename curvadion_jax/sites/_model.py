"""What all sites compute alike, to the bit: contributions, their mean, the outer step.

It runs on the host's CPU, whatever the site trains on, so that sites with other devices
and shardings get the same bits. Numbers come and go as NumPy arrays, in the order of
the parameters' leaves.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax.compressors import Codec
from curvadion_jax.sites._store import as_bytes

log = logging.getLogger("curvadion_jax.sites")

Arrays = list[np.ndarray]


class Outer(NamedTuple):
    """The outer side of a run before a round, the same at all sites."""

    anchor: Arrays
    state: Arrays  # the leaves of the outer optimizer's
    digest: str  # of the anchor


class Model:
    """The functions of one run, for parameters of these shapes.

    Attributes:
      names, shapes: of the parameters' leaves.
      message: shapes of a contribution.
      snapshot: shapes of a snapshot: the anchor and the outer optimizer's state.
    """

    def __init__(
        self, params: Any, outer: optax.GradientTransformation, codec: Codec
    ) -> None:
        leaves, self._structure = jax.tree.flatten_with_path(params)
        name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        self.names = [name(path) for path, _ in leaves]
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves]
        self._outer, self._codec = optax.with_extra_args_support(outer), codec
        self._wide = [
            jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))
            for x in self.shapes
        ]
        message = jax.eval_shape(codec.encode, self._wide)
        self.message, self._message_tree = jax.tree.flatten(message)
        state = jax.eval_shape(self._initial, self.shapes)
        state, self._state_tree = jax.tree.flatten(state)
        self.snapshot = [*self.shapes, *state]
        self._programs: dict[str, Callable[..., Any]] = {}
        self._fingerprint = ""

    def fingerprint(self) -> str:
        """Of the outer optimizer: what two steps make of an anchor that all know.

        It compiles every program on the way, so that no round waits for that.
        """
        if self._fingerprint:
            return self._fingerprint
        anchor, drift = (
            [np.resize(pattern, x.shape).astype(x.dtype) for x in shapes]
            for pattern, shapes in (
                (np.linspace(-1, 1, 251), self.shapes),
                (np.linspace(-1, 2, 83), self._wide),
            )
        )
        _, message, _ = self.encode(anchor, anchor, self.zeros())
        self.norm(message)
        outer = self.initial(anchor)
        self.step(outer, [(message, 1.0)], 1)
        for _ in range(2):
            outer = self._outer_step(outer, drift)
        self._fingerprint = _digest([*outer.anchor, *outer.state])
        return self._fingerprint

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        return self.from_snapshot([*params, *to_host(self._run(self._initial, params))])

    def from_snapshot(self, arrays: Arrays) -> Outer:
        anchor = arrays[: len(self.shapes)]
        return Outer(anchor, arrays[len(self.shapes) :], _digest(anchor))

    def zeros(self) -> Arrays:
        """A residual, before anything was sent."""
        return [np.zeros(x.shape, x.dtype) for x in self._wide]

    def encode(self, params: Arrays, anchor: Arrays, residual: Arrays) -> list[Arrays]:
        """How far parameters are from the anchor, in at least float32; the message for
        that and a residual; and the residual after it.
        """
        return [to_host(x) for x in self._run(self._encode, params, anchor, residual)]

    def norm(self, message: Arrays) -> float:
        """Of what a message stands for; not finite if any element is not."""
        return float(self._run(self._norm, message))

    def step(
        self, outer: Outer, messages: Iterable[tuple[Arrays, float]], count: float
    ) -> Outer:
        """The outer step along the mean of messages: times their weights, over a count.

        They are added in their order, and nothing is fused: XLA rounds a multiplication
        and an addition once or twice, as its flags and the CPU are. One operation at a
        time gives the same bits on all machines, as IEEE 754 defines them.
        """
        total = self.zeros()
        with np.errstate(all="ignore"):
            for message, weight in messages:
                decoded = to_host(self._run(self._decode, message))
                pairs = zip(total, decoded, strict=True)
                total = [x + y * np.float32(weight) for x, y in pairs]
            mean = [x / np.float32(count) for x in total]
        return self._outer_step(outer, mean)

    def _outer_step(self, outer: Outer, drift: Arrays) -> Outer:
        with jax.default_device(_cpu()), jax.disable_jit():
            anchor, old, gradient = (
                [jnp.asarray(x) for x in arrays]
                for arrays in (outer.anchor, outer.state, drift)
            )
            updates, state = self._outer.update(
                self._tree([-x for x in gradient]),
                jax.tree.unflatten(self._state_tree, old),
                self._tree(anchor),
            )
            # `optax.apply_updates` would add in the anchor's dtype.
            pairs = zip(anchor, jax.tree.leaves(updates), strict=True)
            new = [(x + u).astype(x.dtype) for x, u in pairs]
            if not all(jnp.isfinite(x).all() for x in new):
                log.error(
                    "The outer step is not finite, and the outer parameters stay as "
                    "they are there. Look at the outer optimizer."
                )
            pairs = zip(new, anchor, strict=True)
            new = [jnp.where(jnp.isfinite(x), x, y) for x, y in pairs]
            pairs = zip(jax.tree.leaves(state), old, strict=True)
            state = [_finite_or(x.astype(y.dtype), y) for x, y in pairs]
        return self.from_snapshot(to_host([new, state]))

    def _tree(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def _initial(self, leaves: Any) -> Any:
        return self._outer.init(self._tree(leaves))

    def _encode(self, params, anchor, residual):
        pairs = zip(params, anchor, self._wide, strict=True)
        drift = [x.astype(z.dtype) - y.astype(z.dtype) for x, y, z in pairs]
        whole = [x + y for x, y in zip(drift, residual, strict=True)]
        message = self._codec.encode(whole)
        sent = self._codec.decode(message, whole)
        left = [x - y for x, y in zip(whole, sent, strict=True)]
        return drift, message, [jnp.where(jnp.isfinite(x), x, 0) for x in left]

    def _decode(self, message: Any) -> list[jax.Array]:
        tree = jax.tree.unflatten(self._message_tree, message)
        return self._codec.decode(tree, self._wide)

    def _norm(self, message: Any) -> jax.Array:
        found = [x.reshape(-1) for x in self._decode(message) if x.size]
        return jnp.linalg.norm(jnp.stack([jnp.linalg.norm(x) for x in found]))

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A program on the CPU, compiled once."""
        program = self._programs.setdefault(function.__name__, jax.jit(function))
        with jax.default_device(_cpu()):
            return program(*arguments)


@functools.cache
def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "Sites compute the outer step on the host's CPU, which JAX was told not to "
            "use. Add it, as in JAX_PLATFORMS=tpu,cpu."
        ) from error


def to_host(tree: Any) -> Arrays:
    """The leaves as NumPy arrays, which may share the memory of theirs."""
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _digest(arrays: Arrays) -> str:
    found = hashlib.sha256()
    for x in arrays:
        found.update(as_bytes(x))
    return found.hexdigest()[:32]


def _finite_or(new: jax.Array, old: jax.Array) -> jax.Array:
    """New elements where they are finite, old ones elsewhere.

    A scalar of a state may be meant to be infinite.
    """
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return jnp.where(jnp.isfinite(new) if new.ndim else ~jnp.isnan(new), new, old)
