"""The training steps that are compiled: model, optimizer, and where every array lies.

Nothing is computed and nothing allocated: parameters, state and batch are shapes with a
sharding. Inside a replica parameters are divided as is usual: the width of the residual
stream over "fsdp", the other side of a matrix over "tensor", the batch over "fsdp";
embedding and head only along the width, over both axes.
Activations are held to the batch between blocks: left to itself the compiler divides
them like the parameters, and every chip computes the whole batch of its replica.
The optimizer's state lies as its `init` places it beside such parameters.
"""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "char_lm"))
import measuring
import model

import curvadion_jax as cd

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


Optimizer = Callable[[Mesh | None, Any], optax.GradientTransformation]
OPTIMIZERS: dict[str, Optimizer] = {
    "local_muon": lambda mesh, specs: cd.local_muon(
        RATE, dimension_numbers=measuring.matrices, mesh=mesh, specs=specs
    ),
    "curvadion rank 1/4": lambda mesh, specs: cd.curvadion(
        RATE,
        rank=RANK,
        dimension_numbers=measuring.matrices,
        mesh=mesh,
        specs=specs,
    ),
    "synchronous_dion rank 1/4": lambda mesh, specs: cd.presets.synchronous_dion(
        RATE,
        rank=RANK,
        dimension_numbers=measuring.matrices,
        mesh=mesh,
        specs=specs,
    ),
    "adamw": lambda mesh, specs: optax.adamw(RATE),
}


# Whose syncs follow from the step number: a step that is due is a sync.
BY_STEP_NUMBER = ("local_muon",)
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


def specs(params: Any, mesh: Mesh) -> Any:
    """`spec` of every parameter."""
    names = lambda path: tuple(str(key.key) for key in path)
    return jax.tree.map_with_path(
        lambda path, x: spec(names(path), x.ndim, mesh), params
    )


def _placed(tree: Any, inner: Any, mesh: Mesh, rows: bool) -> Any:
    """Shapes with shardings, as rows or of one replica."""

    def place(x, inner):
        shape = (mesh.shape[AXIS], *x.shape) if rows else x.shape
        where = P(AXIS, *inner) if rows else inner
        sharding = NamedSharding(mesh, where)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree, inner)


def _as_init_places(tx: Any, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state with the shardings that the compiled `init` gives it."""
    compiled = jax.jit(tx.init).lower(params).compile()
    places = jax.tree.leaves(compiled.output_shardings)
    leaves, structure = jax.tree.flatten(jax.eval_shape(tx.init, params))

    def placed(x, place):
        # A constant of `init` lies on no device of the mesh.
        on_mesh = place.device_set == {*mesh.devices.flat}
        sharding = place if on_mesh else NamedSharding(mesh, P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return structure.unflatten(map(placed, leaves, places))


def _as_parameters(tx: Any, params: Any, mesh: Mesh) -> Any:
    """The state of an optimizer of Optax, whose moments lie as parameters do."""

    def placed(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return optax.tree.map_params(
        tx,
        lambda x, like: placed(x, like.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: placed(x, NamedSharding(mesh, P())),
    )


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


def build(size: Size, optimizer: str, mesh: Mesh, due: bool | None = None) -> Step:
    """The training step of a model of this size, over the mesh."""
    network = gpt(size)
    shapes = parameters(network)
    inner = specs(shapes, mesh)
    tx = measuring.when(OPTIMIZERS[optimizer](mesh, inner), due)
    synchronous = optimizer in SYNCHRONOUS
    axes = NamedSharding(mesh, P((AXIS, "fsdp")))
    # Inside `map` the replica axis is not to be seen.
    held = _Held(_held_to_batch(network, axes if synchronous else P("fsdp")))
    loss_fn = functools.partial(model.next_token_loss, held)

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = differentiate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    sequences = mesh.shape["fsdp"] * size.rows
    if synchronous:
        differentiate = jax.value_and_grad(loss_fn)
        shape, places = (mesh.shape[AXIS] * sequences,), axes
    else:
        differentiate = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)
        shape = mesh.shape[AXIS], sequences
        places = NamedSharding(mesh, P(AXIS, "fsdp"))
    batch = jax.ShapeDtypeStruct((*shape, size.length + 1), jnp.int32, sharding=places)
    params = _placed(shapes, inner, mesh, rows=not synchronous)
    place = _as_parameters if synchronous else _as_init_places
    state = params, place(tx, params, mesh)
    return Step(jax.jit(train_step, donate_argnums=0), state, batch)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
