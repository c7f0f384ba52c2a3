"""What all sites compute alike, to the bit: messages, their mean, the outer step.

On the host's CPU, whatever the site trains on: sites of other devices, meshes and
shardings then get the same bits. Numbers come and go as NumPy arrays, in the order of
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

from curvadion_jax import _finite, _paths
from curvadion_jax._layout import ONE_DEVICE
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax.compressors import Codec
from curvadion_jax.synchronizers import _anchor_step, _fragments

log = logging.getLogger("curvadion_jax.sites")

Arrays = list[np.ndarray]


class Outer(NamedTuple):
    """The outer side of a run after a round, the same at all sites.

    Attributes:
      anchor: the outer parameters.
      states: of the outer optimizer, the leaves for each fragment.
      digests: of the anchor's fragments.
    """

    anchor: Arrays
    states: list[Arrays]
    digests: list[str]

    @property
    def digest(self) -> str:
        """Of the anchor."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:32]


class Model:
    """The functions of one run, for parameters of these shapes.

    Attributes:
      shapes, names: of the parameters' leaves.
      indices: which leaves each fragment has.
      messages: shapes of each fragment's message.
      snapshot: shapes of a snapshot: the anchor, and the outer optimizer's states.
    """

    def __init__(
        self,
        params: Any,
        outer: optax.GradientTransformation,
        form: Codec,
        fragments: int,
    ) -> None:
        leaves, self._structure = jax.tree.flatten(params)
        self.shapes = [_shape(x, x.dtype) for x in leaves]
        self.names = [name for name, _ in _paths.leaves_with_path(params)]
        self._outer, self._form = optax.with_extra_args_support(outer), form
        tree = jax.tree.unflatten(self._structure, self.shapes)
        self.indices = [
            [i for i, name in enumerate(self.names) if _fragments.holds(part, name)]
            for part in _fragments.split(tree, fragments)
        ]
        wide = [_shape(x, compute_dtype(x.dtype)) for x in self.shapes]
        self._drifts = [self.part(wide, p) for p in range(fragments)]
        messages = [jax.eval_shape(form.encode, drift) for drift in self._drifts]
        states = [
            jax.eval_shape(self._initial(p), self.part(self.shapes, p))
            for p in range(fragments)
        ]
        self._message_trees = [jax.tree.structure(x) for x in messages]
        self._state_trees = [jax.tree.structure(x) for x in states]
        self.messages = [jax.tree.leaves(x) for x in messages]
        self._states = [jax.tree.leaves(x) for x in states]
        self.snapshot = [*self.shapes, *(x for state in self._states for x in state)]
        self._programs: dict[Any, Callable[..., Any]] = {}

    def fragment(self, number: int) -> int:
        """Which a round is of."""
        return number % len(self.indices)

    def part(self, arrays: Sequence[Any], fragment: int) -> list[Any]:
        """A fragment's, of arrays in the order of the parameters' leaves."""
        return [arrays[i] for i in self.indices[fragment]]

    def initial(self, params: Arrays) -> Outer:
        """The outer side of a run that begins at these parameters."""
        states = []
        for p in range(len(self.indices)):
            state = self._run(("initial", p), self._initial(p), self.part(params, p))
            states.append(host(state))
        return self._with_digests(params, states)

    def from_snapshot(self, arrays: Arrays) -> Outer:
        """What `to_snapshot` made one list of."""
        rest, states = iter(arrays[len(self.shapes) :]), []
        for shapes in self._states:
            states.append([next(rest) for _ in shapes])
        return self._with_digests(arrays[: len(self.shapes)], states)

    def to_snapshot(self, outer: Outer) -> Arrays:
        return [*outer.anchor, *(x for state in outer.states for x in state)]

    def drift(self, fragment: int, new: Arrays, anchor: Arrays) -> Arrays:
        """How far a fragment's parameters are from its anchor, at least float32."""

        def difference(new, anchor):
            return [
                _anchor_step.difference(*pair) for pair in zip(new, anchor, strict=True)
            ]

        return host(self._run(("drift", fragment), difference, new, anchor))

    def encode(self, fragment: int, drift: Arrays, owed: Arrays):
        """The message of what a site brings and owes, and what it then still owes."""

        def encode(drift, owed):
            whole = [x + r for x, r in zip(drift, owed, strict=True)]
            message = self._form.encode(whole)
            sent = self._form.decode(message, whole)
            left = [x - y for x, y in zip(whole, sent, strict=True)]
            return jax.tree.leaves(message), _finite.finite_elements(left)

        message, left = self._run(("encode", fragment), encode, drift, owed)
        return host(message), host(left)

    def nothing_owed(self, fragment: int) -> Arrays:
        return [np.zeros(x.shape, x.dtype) for x in self._drifts[fragment]]

    def compile(self, outer: Outer) -> None:
        """Runs every program once, so that no round waits for it."""
        for p in range(len(self.indices)):
            anchor = self.part(outer.anchor, p)
            message, _ = self.encode(
                p, self.drift(p, anchor, anchor), self.nothing_owed(p)
            )
            self.norm(p, message)
            self.step(outer, p, [(message, 1.0)], 1)

    def norm(self, fragment: int, message: Arrays) -> float:
        """Of what a message stands for; not finite if any of it is not."""

        def norm(message):
            found = self._decoded(fragment, message)
            norms = jnp.stack([jnp.linalg.norm(x.reshape(-1)) for x in found if x.size])
            return jnp.linalg.norm(norms)

        return float(self._run(("norm", fragment), norm, message))

    def step(
        self,
        outer: Outer,
        fragment: int,
        posts: Iterable[tuple[Arrays, float]],
        count: float,
    ) -> Outer:
        """The outer step along the mean of messages times their weights over a count.

        They are added in their order, and nothing is fused: XLA may make one rounding
        of a multiplication and an addition, or not, as its flags and the CPU are. One
        operation at a time gives the same bits on all machines, as IEEE 754 defines
        them for all that optimizers by elements do.
        """
        total = self.nothing_owed(fragment)
        with np.errstate(all="ignore"):
            for message, weight in posts:
                decode = functools.partial(self._decoded, fragment)
                found = host(self._run(("decode", fragment), decode, message))
                pairs = zip(total, found, strict=True)
                total = [x + y * np.float32(weight) for x, y in pairs]
            mean = [x / np.float32(count) for x in total]
        with jax.default_device(_cpu()), jax.disable_jit():
            anchor = self._masked(
                self._put(self.part(outer.anchor, fragment)), fragment
            )
            new, state = _anchor_step.outer_step(
                self._outer,
                self._masked(self._put(mean), fragment),
                anchor,
                jax.tree.unflatten(
                    self._state_trees[fragment], self._put(outer.states[fragment])
                ),
                ONE_DEVICE,
            )
            if not _finite.all_finite(new):
                log.error(
                    "the outer step is not finite: where it is not the outer "
                    "parameters stay as they are. Look at the outer optimizer"
                )
            new = _finite.where_finite(new, new, anchor)
        return self._replaced(outer, fragment, host(new), host(state))

    def _put(self, arrays: Arrays) -> list[jax.Array]:
        return [jnp.asarray(x) for x in arrays]

    def _replaced(self, outer: Outer, fragment: int, new: Arrays, state: Arrays):
        anchor, states = list(outer.anchor), list(outer.states)
        for index, x in zip(self.indices[fragment], new, strict=True):
            anchor[index] = x
        states[fragment], digests = state, list(outer.digests)
        digests[fragment] = _digest(new)
        return Outer(anchor, states, digests)

    def _with_digests(self, anchor: Arrays, states: list[Arrays]) -> Outer:
        parts = (self.part(anchor, p) for p in range(len(self.indices)))
        return Outer(anchor, states, [_digest(part) for part in parts])

    def _initial(self, fragment: int) -> Callable[[Any], Any]:
        return lambda anchor: self._outer.init(self._masked(anchor, fragment))

    def _masked(self, arrays: Sequence[Any], fragment: int) -> Any:
        """A fragment as a tree, with `MaskedNode` for the others' parameters."""
        found = dict(zip(self.indices[fragment], arrays, strict=True))
        whole = [found.get(i, optax.MaskedNode()) for i in range(len(self.shapes))]
        return jax.tree.unflatten(self._structure, whole)

    def _decoded(self, fragment: int, message: Sequence[Any]) -> list[jax.Array]:
        tree = jax.tree.unflatten(self._message_trees[fragment], message)
        return self._form.decode(tree, self._drifts[fragment])

    def _run(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """A program on the CPU, compiled once."""
        program = self._programs.setdefault(key, jax.jit(function))
        with jax.default_device(_cpu()):
            return program(*arguments)


@functools.cache
def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "sites compute the outer step on the host's CPU, which JAX was told not to "
            "use: add it, as in JAX_PLATFORMS=tpu,cpu"
        ) from error


def _shape(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype)


def host(tree: Any) -> Arrays:
    """The leaves as NumPy arrays, which may share the memory of theirs."""
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _digest(arrays: Arrays) -> str:
    found = hashlib.sha256()
    for x in arrays:
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
