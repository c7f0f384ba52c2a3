"""What all sites compute alike, to the bit: contributions, their mean, the outer step.

It runs on the host's CPU, whatever the site trains on, so that sites with other devices
and shardings get the same bits. Numbers come and go as NumPy arrays, in the order of
the parameters' leaves.
"""

import functools
import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curvadion_jax.compressors import Codec
from curvadion_jax.sites import _parts
from curvadion_jax.sites._store import as_bytes

log = logging.getLogger("curvadion_jax.sites")

Arrays = list[np.ndarray]
# Of anchor and outer state, places that take a step together, and those that all need.
Parts = tuple[list[list[int]], list[int]]
# The longest axis of arrays whose outer steps sites compare when they join.
_FEW = 4


class Outer(NamedTuple):
    """The outer side of a run before a round, the same at all sites.

    The anchor has at least float32: a mean of many sites is often smaller than what
    bfloat16 can add to a parameter, and would be lost round after round.
    """

    anchor: Arrays
    state: Arrays  # the leaves of the outer optimizer's state
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

    def encode(self, x: np.ndarray) -> Arrays:
        return to_host(self.encoder(x))

    def decode(self, message: Arrays) -> np.ndarray:
        return np.asarray(self.decoder(message))

    @functools.cached_property
    def encoder(self) -> Any:
        return _compiled(lambda x: jax.tree.leaves(self._codec.encode([x])), self._like)

    @functools.cached_property
    def decoder(self) -> Any:
        unflatten = self._structure.unflatten
        decode = lambda x: self._codec.decode(unflatten(x), [self._like])[0]
        return _compiled(decode, self.message)


def _compiled(function: Any, like: Any) -> Any:
    with jax.default_device(cpu()):
        return jax.jit(function).lower(like).compile()


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
        state = jax.tree.leaves(jax.eval_shape(self._initial, self._wide))
        for x in state:
            if jnp.issubdtype(x.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"outer has an array of {x.dtype} in its state, such as a random "
                    "key, which sites do not store. Give an outer optimizer without it."
                )
        self.snapshot = [*self._wide, *state]

    def compile(self) -> None:
        """Compiles what a round needs, so that no round waits for it."""
        for form in self._forms:
            _ = form.encoder, form.decoder
        _ = self._parts

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two outer steps make of an anchor that all sites know.

        Its arrays have as many axes as the model's, and few elements.
        """
        return self._small._two_steps(self._small._whole)

    @functools.cached_property
    def _small(self) -> "Model":
        shapes = [
            jax.ShapeDtypeStruct([min(n, _FEW) for n in x.shape], x.dtype)
            for x in self.shapes
        ]
        return Model(self._tree(shapes), self._outer, self._codec)

    def _two_steps(self, parts: Parts) -> str:
        line = np.linspace(-1, 1, 251)
        params = [np.resize(line, x.shape).astype(x.dtype) for x in self.shapes]
        gradients = [np.resize(line + 0.5, x.shape).astype(x.dtype) for x in self._wide]
        outer = self.initial(params)
        for _ in range(2):
            outer = self._outer_step(outer, [-x for x in gradients], parts)
        return outer.digest

    @functools.cached_property
    def _parts(self) -> Parts:
        """Arrays that take the outer step together; all, if parts do not do the same.

        A program does not show what an optimizer makes of the number of all elements,
        so two steps of few elements have to agree as well.
        """
        try:
            found, small = self._found_parts(), self._small
            if small._two_steps(small._found_parts()) == self.fingerprint:
                return found
        # At a part of a tree an optimizer may raise anything.
        except Exception as error:
            log.debug("The outer step is taken for all arrays at once: %r", error)
        return self._whole

    @property
    def _whole(self) -> Parts:
        return [[*range(len(self.snapshot))]], []

    def _found_parts(self) -> Parts:
        def step(gradients: Sequence[Any], old: Sequence[Any]) -> list[Any]:
            found = self._step_of(dict(enumerate(gradients)), dict(enumerate(old)))
            return [found[place] for place in range(len(old))]

        return _parts.parts(step, self._wide, self.snapshot)

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        anchor = _cast(params, self._wide)
        with jax.default_device(cpu()):
            state = self._initial([jnp.asarray(x) for x in anchor])
        return self.from_snapshot([*anchor, *to_host(state)])

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

    def encode(self, params: Arrays, anchor: Arrays, residual: Arrays) -> Arrays:
        """The message for the drift, parameters minus anchor, plus the residual.

        The anchor is what training was given, in the parameters' dtypes. Measured from
        the wider one, every drift would take back what rounding had dropped.
        """
        message: Arrays = []
        for index, form in enumerate(self._forms):
            with np.errstate(all="ignore"):  # NaN is found by who reads it
                whole = drift(params[index], anchor[index]) + residual[index]
            message += form.encode(whole)
        return message

    def leave_unsent(
        self, residual: Arrays, params: Arrays, anchor: Arrays, message: Arrays
    ) -> None:
        """Makes a residual, in place, what of it and the drift a message lacks."""
        for index, decoded in enumerate(self._decoded(message)):
            whole = drift(params[index], anchor[index]) + residual[index]
            residual[index] = whole - decoded

    def norm(self, message: Arrays) -> float:
        """The norm of the decoded message; not finite if any element is not."""
        with np.errstate(all="ignore"):
            norms = [float(np.linalg.norm(x)) for x in self._decoded(message)]
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
        with np.errstate(all="ignore"):
            for message, weight in messages:
                for x, decoded in zip(total, self._decoded(message), strict=True):
                    x += decoded * np.float32(weight)
            for x in total:
                x /= -np.float32(count)  # the pseudo-gradient points backwards
        return self._outer_step(outer, total, self._parts)

    def _decoded(self, message: Arrays) -> Iterator[np.ndarray]:
        """The arrays of a message, one after the other."""
        rest = iter(message)
        for form in self._forms:
            yield form.decode([next(rest) for _ in form.message])

    def _outer_step(self, outer: Outer, gradients: Arrays, parts: Parts) -> Outer:
        """The outer side after a step, for which it uses up the gradients.

        In parts it needs 28 bytes per parameter at most, and 43 in one (90 million
        parameters in float32, 2 bits, a Nesterov step): Optax makes several arrays of
        all that it is given.
        """
        apart, common = parts
        rest: list[Any] = gradients
        old = [*outer.anchor, *outer.state]
        after = [*old]
        for places in apart:
            inside = sorted({*places, *common})
            with jax.default_device(cpu()), jax.disable_jit():
                found = self._step_of(
                    {x: jnp.asarray(rest[x]) for x in inside if x < len(rest)},
                    {x: jnp.asarray(old[x]) for x in inside},
                )
            for place in inside:
                x = after[place] = np.asarray(found.pop(place))
                if not self._is_finite(place, x):
                    log.error(
                        "The outer step contains NaN or Inf, and nothing changes in "
                        "this round. Look at the outer optimizer."
                    )
                    return outer
                if place < len(rest):
                    rest[place] = None  # frees as much as the new anchor takes
        return self.from_snapshot(after)

    def _step_of(
        self, gradients: Mapping[int, Any], old: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Anchor and state after a step, by their places; some arrays or all.

        As in `optax.masked`, where there is no array there is an empty node.
        """
        count, none = len(self._wide), optax.MaskedNode()
        anchor = self._tree([old.get(x, none) for x in range(count)])
        updates = self._tree([gradients.get(x, none) for x in range(count)])
        state = jax.tree.structure(jax.eval_shape(self._outer.init, anchor))
        leaves = [old[x] for x in sorted(old) if x >= count]
        updates, new = self._outer.update(updates, state.unflatten(leaves), anchor)
        moved: Any = optax.apply_updates(anchor, updates)
        new = optax.tree.cast_like(jax.tree.leaves(new), leaves)
        return dict(zip(sorted(old), [*jax.tree.leaves(moved), *new], strict=True))

    def _is_finite(self, place: int, x: np.ndarray) -> bool:
        """Whether all of a result is; anchors as training gets them."""
        if place < len(self.shapes):
            (x,) = _cast([x], [self.shapes[place]])
        elif x.ndim == 0:  # which may be infinite on purpose: a minimum begins so
            return True
        return bool(np.isfinite(x).all())

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


def drift(params: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    """How far parameters are from an anchor, in at least float32."""
    dtype = wide(params.dtype)
    return params.astype(dtype) - anchor.astype(dtype)


def wide(dtype: Any) -> jnp.dtype:
    """The dtype to compute in: at least float32."""
    return jnp.promote_types(jnp.float32, dtype)


def to_host(tree: Any) -> Arrays:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
