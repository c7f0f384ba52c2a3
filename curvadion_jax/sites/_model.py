"""What all sites compute alike, to the bit: contributions, and a step along their mean.

It runs on the host's CPU, whatever the site trains on, so that sites with other devices
and shardings get the same bits. Numbers come and go as NumPy arrays, in the order of
the parameters' leaves.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from curvadion_jax.compressors import Codec
from curvadion_jax.sites._arrays import Arrays, on_cpu, to_host, wide
from curvadion_jax.sites._outer_step import Outer, OuterStep


class _Form:
    """How an array of one shape is sent. Every array is encoded and read alone.

    So nothing needs more memory at once than a few of the largest array, and arrays of
    one shape share their programs.
    """

    def __init__(self, codec: Codec, like: jax.ShapeDtypeStruct) -> None:
        self._codec, self._like = codec, like
        with on_cpu():
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
    with on_cpu():
        return jax.jit(function).lower(like).compile()


class Model:
    """The functions of one run, for parameters of these shapes."""

    def __init__(
        self, params: Any, outer: optax.GradientTransformation, codec: Codec
    ) -> None:
        leaves, _ = jax.tree.flatten_with_path(params)
        self.names = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves]
        self.outer_step = OuterStep(params, outer)
        self._wide = self.outer_step.wide  # shapes of drifts and residuals too
        forms = {x: _Form(codec, x) for x in self._wide}
        self._forms = [forms[x] for x in self._wide]
        self.nbytes = sum(x.size * x.dtype.itemsize for x in self._wide)
        # Shapes of a contribution.
        self.message = [x for form in self._forms for x in form.message]

    def compile(self) -> None:
        """Compiles what a round needs, so that no round waits for it."""
        for form in self._forms:
            _ = form.encoder, form.decoder
        _ = self.outer_step.parts

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
        step = self.outer_step
        return step.take(outer, total, step.parts)

    def _decoded(self, message: Arrays) -> Iterator[np.ndarray]:
        """The arrays of a message, one after the other."""
        rest = iter(message)
        for form in self._forms:
            yield form.decode([next(rest) for _ in form.message])


def drift(params: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    """How far parameters are from an anchor, in at least float32."""
    dtype = wide(params.dtype)
    return params.astype(dtype) - anchor.astype(dtype)
