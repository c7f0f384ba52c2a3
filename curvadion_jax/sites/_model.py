"""What all sites compute alike, to the bit: contributions, their mean, the outer step.

It runs on the host's CPU, whatever the site trains on, so that sites with other devices
and shardings get the same bits. Numbers come and go as NumPy arrays, in the order of
the parameters' leaves.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
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
    """The outer side of a run before a round, the same at all sites.

    The anchor has at least float32: a mean of many sites is often smaller than what
    bfloat16 can add to a parameter, and would be lost round after round.
    """

    anchor: Arrays
    state: Arrays  # the leaves of the outer optimizer's state
    digest: str  # of both
    params: Arrays  # the anchor, rounded to the dtypes that are trained


class Model:
    """The functions of one run, for parameters of these shapes."""

    def __init__(
        self, params: Any, outer: optax.GradientTransformation, codec: Codec
    ) -> None:
        leaves, self._structure = jax.tree.flatten_with_path(params)
        self.names = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves]
        self._outer, self._codec = outer, codec
        # Shapes of the anchor, of drifts and of residuals.
        self._wide: Any = [
            jax.ShapeDtypeStruct(x.shape, wide(x.dtype)) for x in self.shapes
        ]
        # Shapes of a contribution, and of a snapshot: anchor and outer state.
        message = jax.eval_shape(codec.encode, self._wide)
        self.message, self._message_tree = jax.tree.flatten(message)
        state = jax.eval_shape(self._initial, self._wide)
        state, self._state_tree = jax.tree.flatten(state)
        self.snapshot = [*self._wide, *state]
        self._jit = functools.cache(jax.jit)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two outer steps make of an anchor that all sites know.

        It compiles every program on the way, so that no round waits for that.
        """
        line = np.linspace(-1, 1, 251)
        params = [np.resize(line, x.shape).astype(x.dtype) for x in self.shapes]
        drift = [np.resize(line + 0.5, x.shape).astype(x.dtype) for x in self._wide]
        _, message, _ = self.encode(params, params, self.zeros())
        self.norm(message)
        outer = self.initial(params)
        self.step(outer, [(message, 1.0)], 1)
        return self._outer_step(self._outer_step(outer, drift), drift).digest

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        anchor = _cast(params, self._wide)
        return self.from_snapshot([*anchor, *to_host(self._run(self._initial, anchor))])

    def from_snapshot(self, arrays: Arrays) -> Outer:
        """The outer side of an anchor and the outer state, in this order."""
        digest, count = hashlib.sha256(), len(self.shapes)
        for x in arrays:
            digest.update(as_bytes(x))
        anchor, state = arrays[:count], arrays[count:]
        params = _cast(anchor, self.shapes)
        return Outer(anchor, state, digest.hexdigest()[:32], params)

    def zeros(self) -> Arrays:
        return [np.zeros(x.shape, x.dtype) for x in self._wide]

    def encode(self, params: Arrays, anchor: Arrays, residual: Arrays) -> list[Arrays]:
        """The drift (parameters minus anchor, in at least float32), the message for
        drift plus residual, and the residual after it.

        The anchor is what training was given, in the parameters' dtypes. Measured from
        the wider one, every drift would take back what rounding had dropped.
        """
        return [to_host(x) for x in self._run(self._encode, params, anchor, residual)]

    def norm(self, message: Arrays) -> float:
        """The norm of the decoded message; not finite if any element is not."""
        return float(self._run(self._norm, message))

    def step(
        self, outer: Outer, messages: Iterable[tuple[Arrays, float]], count: float
    ) -> Outer:
        """The outer step along the weighted sum of messages, divided by a count.

        Messages are added in their order, one operation at a time. XLA rounds a fused
        multiplication and addition once or twice, depending on its flags and the CPU;
        single operations give the same bits on all machines, as IEEE 754 defines them.
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
            anchor, old = jax.tree.map(jnp.asarray, (outer.anchor, outer.state))
            updates, state = self._outer.update(
                self._tree([-jnp.asarray(x) for x in drift]),
                jax.tree.unflatten(self._state_tree, old),
                self._tree(anchor),
            )
            new: Any = optax.apply_updates(anchor, jax.tree.leaves(updates))
            state = optax.tree.cast_like(jax.tree.leaves(state), old)
        after = self.from_snapshot(to_host([new, state]))
        # A scalar of the state may be infinite on purpose: a minimum begins so.
        arrays = [*after.params, *(x for x in after.state if x.ndim)]
        if not all(jnp.isfinite(x).all() for x in arrays):
            log.error(
                "The outer step contains NaN or Inf, and nothing changes in this "
                "round. Look at the outer optimizer."
            )
            return outer
        return after

    def _tree(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def _initial(self, leaves: Any) -> Any:
        return self._outer.init(self._tree(leaves))

    def _encode(self, params, anchor, residual):
        params, anchor = (optax.tree.cast_like(x, self._wide) for x in (params, anchor))
        for name, x, y in zip(self.names, params, anchor, strict=True):
            if x.shape != y.shape:  # which might be broadcast
                raise ValueError(
                    f"Parameter {name} has shape {x.shape}, and had {y.shape} when "
                    "the site joined. Join again with another URL to change the model."
                )
        drift = optax.tree.sub(params, anchor)
        whole = optax.tree.add(drift, residual)
        message = self._codec.encode(whole)
        return drift, message, optax.tree.sub(whole, self._codec.decode(message, whole))

    def _decode(self, message: Any) -> list[jax.Array]:
        tree = jax.tree.unflatten(self._message_tree, message)
        return self._codec.decode(tree, self._wide)

    def _norm(self, message: Any) -> jax.Array:
        return optax.tree.norm(self._decode(message))

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a program on the CPU, compiled once."""
        with jax.default_device(_cpu()):
            return self._jit(function)(*arguments)


def _cpu() -> Any:
    return jax.local_devices(backend="cpu")[0]


def _cast(arrays: Arrays, like: Sequence[Any]) -> Arrays:
    """The arrays in the dtypes of others; not copied where they have them."""
    with np.errstate(over="ignore"):  # what becomes Inf is found by who checks it
        pairs = zip(arrays, like, strict=True)
        return [x.astype(other.dtype, copy=False) for x, other in pairs]


def wide(dtype: Any) -> jnp.dtype:
    """The dtype to compute in: at least float32."""
    return jnp.promote_types(jnp.float32, dtype)


def to_host(tree: Any) -> Arrays:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
