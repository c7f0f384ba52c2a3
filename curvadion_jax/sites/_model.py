"""What all sites compute alike, to the bit: contributions, their mean, the outer step.

It runs on the host's CPU, whatever the site trains on, so that sites with other devices
and shardings get the same bits. Numbers come and go as NumPy arrays, in the order of
the parameters' leaves.
"""

import functools
import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax.compressors import Codec
from curvadion_jax.sites._store import as_bytes

log = logging.getLogger("curvadion_jax.sites")

Arrays = list[np.ndarray]
# The longest axis of arrays whose outer steps sites compare when they join.
_FEW = 4


class Outer(NamedTuple):
    """The outer side of a run before a round, the same at all sites.

    The anchor has at least float32: a mean of many sites is often smaller than what
    bfloat16 can add to a parameter, and would be lost round after round.
    """

    anchor: list[jax.Array]  # on the host's CPU, as the state
    state: list[jax.Array]  # the leaves of the outer optimizer's state
    digest: str  # of both
    params: Arrays  # the anchor, rounded to the dtypes that are trained


class _Form:
    """How an array of one shape is sent. Every array is encoded and read alone.

    So nothing needs more memory at once than a few of the largest array, and arrays of
    one shape share their programs.
    """

    def __init__(self, codec: Codec, like: jax.ShapeDtypeStruct) -> None:
        self._codec, self._like = codec, like
        message = jax.eval_shape(codec.encode, [like])
        self.message, self._structure = jax.tree.flatten(message)
        self.encode, self.unsent = jax.jit(self._encode), jax.jit(self._unsent)
        self.decode, self.norm = jax.jit(self._decode), jax.jit(self._norm)

    def _whole(self, param, anchor, residual):
        dtype = self._like.dtype
        return param.astype(dtype) - anchor.astype(dtype) + residual

    def _encode(self, param, anchor, residual):
        whole = self._whole(param, anchor, residual)
        return jax.tree.leaves(self._codec.encode([whole]))

    def _unsent(self, param, anchor, residual, message):
        return self._whole(param, anchor, residual) - self._decode(message)

    def _decode(self, message):
        tree = jax.tree.unflatten(self._structure, message)
        return self._codec.decode(tree, [self._like])[0]

    def _norm(self, message):
        return jnp.linalg.norm(self._decode(message).reshape(-1))


class Model:
    """The functions of one run, for parameters of these shapes."""

    def __init__(
        self, params: Any, outer: optax.GradientTransformation, codec: Codec
    ) -> None:
        leaves, self._structure = jax.tree.flatten_with_path(params)
        self.names = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves]
        self._outer, self._codec = outer, codec
        # Shapes of the anchor and of residuals.
        self._wide = [jax.ShapeDtypeStruct(x.shape, wide(x.dtype)) for x in self.shapes]
        forms = {x: _Form(codec, x) for x in self._wide}
        self._forms = [forms[x] for x in self._wide]
        self.nbytes = sum(x.size * x.dtype.itemsize for x in self._wide)
        # Shapes of a contribution, and of a snapshot: anchor and outer state.
        self.message = [x for form in self._forms for x in form.message]
        state = jax.eval_shape(self._initial, self._wide)
        state, self._state_tree = jax.tree.flatten(state)
        self.snapshot = [*self._wide, *state]

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two outer steps make of an anchor that all sites know.

        Its arrays have as many axes as the model's, and few elements.
        """
        shapes = [
            jax.ShapeDtypeStruct([min(n, _FEW) for n in x.shape], x.dtype)
            for x in self.shapes
        ]
        return Model(self._tree(shapes), self._outer, self._codec)._two_steps()

    def _two_steps(self) -> str:
        line = np.linspace(-1, 1, 251)
        params = [np.resize(line, x.shape).astype(x.dtype) for x in self.shapes]
        gradients = [np.resize(line + 0.5, x.shape).astype(x.dtype) for x in self._wide]
        # Codes of zeros, which all machines have alike.
        message = self.encode(params, params, self.zeros())
        outer = self.step(self.initial(params), [(message, 1.0)], 1)
        for _ in range(2):
            outer = self._outer_step(outer, [-x for x in gradients])
        return outer.digest

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        anchor = [jax.device_put(x, cpu()) for x in _cast(params, self._wide)]
        with jax.default_device(cpu()):
            state = jax.tree.leaves(self._initial(anchor))
        return self.from_snapshot([*anchor, *state])

    def from_snapshot(self, arrays: Sequence[Any]) -> Outer:
        """The outer side of an anchor and the outer state, in this order."""
        digest, count = hashlib.sha256(), len(self.shapes)
        arrays = [jax.device_put(x, cpu()) for x in arrays]
        for x in arrays:
            digest.update(as_bytes(np.asarray(x)))
        anchor, state = arrays[:count], arrays[count:]
        params = _cast([np.asarray(x) for x in anchor], self.shapes)
        return Outer(anchor, state, digest.hexdigest()[:32], params)

    def zeros(self) -> Arrays:
        return [np.zeros(x.shape, x.dtype) for x in self._wide]

    def encode(self, params: Arrays, anchor: Arrays, residual: Arrays) -> Arrays:
        """The message for the drift, parameters minus anchor, plus the residual.

        The anchor is what training was given, in the parameters' dtypes. Measured from
        the wider one, every drift would take back what rounding had dropped.
        """
        message: Arrays = []
        for index, form in enumerate(self._forms):
            own = params[index], anchor[index], residual[index]
            if (found := own[0].shape) != (known := own[1].shape):  # it might broadcast
                raise ValueError(
                    f"Parameter {self.names[index]} has shape {found}, and had {known} "
                    "when the site joined. Join again with another URL to change the "
                    "model."
                )
            with jax.default_device(cpu()):
                message += to_host(form.encode(*own))
        return message

    def leave_unsent(
        self, residual: Arrays, params: Arrays, anchor: Arrays, message: Arrays
    ) -> None:
        """Makes a residual, in place, what of it and the drift a message lacks."""
        for index, (form, own) in enumerate(self._parts(message)):
            given = params[index], anchor[index], residual[index], own
            with jax.default_device(cpu()):
                residual[index] = np.asarray(form.unsent(*given))

    def norm(self, message: Arrays) -> float:
        """The norm of the decoded message; not finite if any element is not."""
        with jax.default_device(cpu()):
            norms = [float(form.norm(own)) for form, own in self._parts(message)]
        return math.hypot(*norms) if all(map(math.isfinite, norms)) else math.nan

    def step(
        self, outer: Outer, messages: Iterable[tuple[Arrays, float]], count: float
    ) -> Outer:
        """The outer step along the weighted sum of messages, divided by a count.

        Messages are added in their order, one operation at a time. XLA rounds a fused
        multiplication and addition once or twice, depending on its flags and the CPU;
        single operations give the same bits on all machines, as IEEE 754 defines them.
        """
        total = self.zeros()
        with np.errstate(all="ignore"), jax.default_device(cpu()):
            for message, weight in messages:
                for index, (form, own) in enumerate(self._parts(message)):
                    weighted = np.asarray(form.decode(own)) * np.float32(weight)
                    total[index] += weighted
            for x in total:
                x /= -np.float32(count)  # the pseudo-gradient points backwards
        return self._outer_step(outer, total)

    def _parts(self, message: Arrays) -> Iterator[tuple[_Form, Arrays]]:
        """Every array's form, and its part of a message."""
        rest = iter(message)
        for form in self._forms:
            yield form, [next(rest) for _ in form.message]

    def _outer_step(self, outer: Outer, gradients: Arrays) -> Outer:
        with jax.default_device(cpu()), jax.disable_jit():
            updates, state = self._outer.update(
                self._tree([jnp.asarray(x) for x in gradients]),
                jax.tree.unflatten(self._state_tree, outer.state),
                self._tree(outer.anchor),
            )
            gradients.clear()
            new: Any = optax.apply_updates(outer.anchor, jax.tree.leaves(updates))
            del updates
            state = optax.tree.cast_like(jax.tree.leaves(state), outer.state)
        after = self.from_snapshot([*new, *state])
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


def cpu() -> Any:
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
