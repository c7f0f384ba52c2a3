"""The training steps that are compiled: model, optimizer, and where every array lies.

Nothing is computed and nothing allocated: parameters, state and batch are shapes with a
sharding. Inside a replica parameters are divided as is usual: the width of the residual
stream over "fsdp", the other side of a matrix over "tensor", the batch over "fsdp";
embedding and head only along the width, over both axes.
Activations are held to the batch between blocks: left to itself the compiler divides
them like the parameters, and every chip computes the whole batch of its replica.
Optimizer state of a parameter's shape lies as that parameter does, and Dion's right
factors as `init` places them beside such parameters.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
import model

import curvadion_jax as cd
from curvadion_jax import _layout, _partition

AXIS = cd.replicas.AXIS
# Rates change no shape.
RATE, RANK = 0.01, 0.25


class Size(NamedTuple):
    """A model, and the batch of the devices that share a part of it."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int


SIZES = {
    "tiny": Size(2, 256, 2, 2048, 256, 1),
    "160m": Size(12, 768, 12, 50304, 1024, 4),
    "1b": Size(16, 2048, 16, 50304, 2048, 1),
    "8b": Size(36, 4096, 32, 50304, 2048, 1),
}


class Place(NamedTuple):
    """Chips, and how replicas are laid on them.

    Attributes:
      topology: chip and shape of a slice, such as "v5e:4x4".
      slices: number of slices; above 1 every slice is a replica.
      replicas: number of replicas.
      inner: axes inside of a replica.
    """

    topology: str
    slices: int
    replicas: int
    inner: tuple[tuple[str, int], ...]

    def mesh(self) -> Mesh:
        """Of the described devices, which need not exist."""
        description = topologies.get_topology_desc(
            self.topology, platform="tpu", num_slices=self.slices
        )
        devices = description.devices
        return cd.replicas.make_mesh(self.replicas, dict(self.inner), devices=devices)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "local_muon": lambda: cd.local_muon(RATE, axis_name=AXIS),
    "curvadion rank 1/4": lambda: cd.curvadion(RATE, rank=RANK, axis_name=AXIS),
    "synchronous_dion rank 1/4": lambda: cd.presets.synchronous_dion(
        RATE, rank=RANK, axis_name=AXIS
    ),
    "adamw": lambda: optax.adamw(RATE),
}


# Whose syncs follow from counters: two programs, of which one synchronises.
BY_COUNTERS = ("local_muon",)
# Whose gradients the compiler averages, as in a program without replicas.
SYNCHRONOUS = ("adamw",)


class Step(NamedTuple):
    """A step that can be lowered: `step.lower(state, batch)`."""

    step: Any
    state: Any
    batch: Any


def parameters(network: model.GPT) -> Any:
    """Shapes of the model's parameters."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(network.init, jax.random.key(0), tokens)["params"]


def spec(names: tuple[str, ...], rank: int, mesh: Mesh) -> P:
    """How a parameter of the example's model is divided inside a replica."""
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    if names[-1] not in ("kernel", "embedding"):
        return P()
    # What has the vocabulary on a side is divided along its width alone, over both
    # axes: else XLA's partitioner aborts inside of a shard_map with two inner axes,
    # with any optimizer, on the lookup of tokens or labels.
    width = ("fsdp", "tensor") if tensor else "fsdp"
    if names[-1] == "embedding":
        return P(None, width)
    if names[-2] == "lm_head":
        return P(width, None)
    to_width = names[-2] in ("out", "down")
    sides = (tensor, "fsdp") if to_width else ("fsdp", tensor)
    return P(*[None] * (rank - 2), *sides)


def _held_to_batch(network: nn.Module, axes: Any) -> Callable[..., Any]:
    """`network.apply` with activations between blocks divided over the batch."""

    def hold(x):
        return jax.lax.with_sharding_constraint(x, axes) if x.ndim == 3 else x

    def interceptor(call, args, kwargs, context):
        result = call(*args, **kwargs)
        held = isinstance(context.module, nn.Embed | model.Block)
        if not held or context.method_name != "__call__":
            return result
        return jax.tree.map(hold, result)

    def apply(*args, **kwargs):
        with nn.intercept_methods(interceptor):
            return network.apply(*args, **kwargs)

    return apply


class _Held(NamedTuple):
    """What `model.next_token_loss` needs of a model."""

    apply: Callable[..., Any]


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def _laid_out(tree: Any, params: Any, mesh: Mesh, leading: int) -> Any:
    """The tree with shardings, and with so many replicas on a leading axis, or 0."""
    known = {
        _names(path): (x.shape, spec(_names(path), x.ndim, mesh))
        for path, x in jax.tree.leaves_with_path(params)
    }
    views = _partition.matrix_views(params, None)
    factors = {
        names: _layout.of_axes(found, views["/".join(names)].q_axes)
        for names, (_, found) in known.items()
        if views["/".join(names)]
    }

    def place(path, x):
        names, inner = _names(path), P()
        for start in range(len(names)):
            shape, found = known.get(names[start:], (None, None))
            if shape == x.shape:
                inner = found
                break
            if names[start:] in factors and {"dion_q", "common"} & set(names):
                inner = P(*factors[names[start:]])
                break
        if not leading:
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, inner)
            )
        sharding = NamedSharding(mesh, P(AXIS, *inner))
        return jax.ShapeDtypeStruct((leading, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map_with_path(place, tree)


def gpt(size: Size) -> model.GPT:
    """The example's model, of this size."""
    return model.GPT(
        vocabulary=size.vocabulary,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        dtype=jnp.bfloat16,
        remat=True,
    )


def build(size: Size, optimizer: str, mesh: Mesh) -> Step:
    """The training step of a model of this size, over the mesh."""
    network = gpt(size)
    params, tx = parameters(network), OPTIMIZERS[optimizer]()

    def create(params):
        return TrainState.create(apply_fn=network.apply, params=params, tx=tx)

    synchronous = optimizer in SYNCHRONOUS
    # Inside a step the replica axis is not to be seen.
    axes = NamedSharding(mesh, P((AXIS, "fsdp")) if synchronous else P("fsdp"))
    held = _Held(_held_to_batch(network, axes))

    def loss_fn(params, tokens_BxT):
        return model.next_token_loss(held, params, tokens_BxT)

    def train_step(state, tokens_BxT):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens_BxT)
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "sync": cd.metrics.observe(state.opt_state)}

    def synchronous_step(state, tokens_BxT):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens_BxT)
        return state.apply_gradients(grads=grads), {"loss": loss}

    replicas = mesh.shape[AXIS]
    rows = replicas * mesh.shape["fsdp"] * size.rows
    batch = jax.ShapeDtypeStruct(
        (rows, size.length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P((AXIS, "fsdp"))),
    )
    state = jax.eval_shape(create, params)
    if synchronous:
        state = _laid_out(state, params, mesh, 0)
        return Step(jax.jit(synchronous_step, donate_argnums=0), state, batch)
    state = _laid_out(state, params, mesh, replicas)
    return Step(cd.replicas.step(train_step, mesh), state, batch)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
