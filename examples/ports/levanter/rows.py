"""`local_muon` in Levanter's trainer: an optimizer config, and a model with rows.

A row, the parameters of a replica, is an axis `replica` of Haliax and of the mesh, so
Levanter places and saves it as it does other axes. Ours are the gradients, taken inside
`cd.replicas.map`, and the optimizer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.tracker
import optax
from jax.sharding import PartitionSpec as P
from levanter.optim.config import OptimizerConfig
from levanter.trainer import Trainer, WrappedLossFunction
from levanter.utils.mesh import MeshConfig

import curvadion_jax as cd


@OptimizerConfig.register_subclass("local_muon")
@dataclasses.dataclass(frozen=True)
class LocalMuonConfig(OptimizerConfig):
    """With Levanter's schedules; makes the optimizer once its trainer has a mesh."""

    budget: float = 0.02

    def build(self, num_train_steps: int) -> Callable[..., Any]:
        schedule = self.lr_scheduler(num_train_steps)
        return functools.partial(cd.local_muon, schedule, budget=self.budget, specs=P())


def mesh_config(replicas: int, inside: int) -> MeshConfig:
    """Of replicas whose devices share a batch, and have all parameters each."""
    axes = {"replica": replicas, "data": inside}
    return MeshConfig(axes=axes, param_mapping={"replica": "replica"})


class ReplicaTrainer(Trainer):
    """Levanter's trainer, of a model with a row for each replica."""

    def __init__(self, config: Any, optimizer: Any, loss_fn: Any) -> None:
        self._mesh = config.device_mesh
        optimizer = of_rows(functools.partial(optimizer, mesh=self._mesh))
        super().__init__(config, optimizer, loss_fn)

    @functools.cached_property
    def loss_fn(self) -> WrappedLossFunction:
        mapping = {**self.compute_axis_mapping, "batch": "data"}  # inside a replica
        return WrappedLossFunction(self._raw_loss_function, self.mp, mapping)

    def initial_state(self, training_key: Any, *, model_init: Any, **given: Any) -> Any:
        Replica = hax.Axis("replica", self._mesh.shape["replica"])

        def rows():
            add = lambda x: x.broadcast_axis(Replica) if hax.is_named_array(x) else x
            return jax.tree.map(add, model_init(), is_leaf=hax.is_named_array)

        return super().initial_state(training_key, model_init=rows, **given)

    def _compute_gradients_microbatched(self, loss_fn, model, *batch, key, **named):
        trained = eqx.filter(model, eqx.is_inexact_array)
        one, rest = eqx.partition(without_rows(model), eqx.is_inexact_array)
        one = jax.tree.structure(one)
        batches, inputs = jax.tree.flatten((batch, named))

        def of_one(leaves, batches, key):
            model = eqx.combine(jax.tree.unflatten(one, leaves), rest)
            batch, named = jax.tree.unflatten(inputs, batches)
            differentiate = eqx.filter_value_and_grad(loss_fn, has_aux=True)
            (loss, _), grads = differentiate(model, *batch, key=key, **named)
            return loss, jax.tree.leaves(grads)

        losses, grads = cd.replicas.map(of_one, self._mesh)(
            jax.tree.leaves(trained),
            cd.replicas.split(batches, self._mesh),
            jax.random.split(key, self._mesh.shape["replica"]),
        )
        grads = jax.tree.unflatten(jax.tree.structure(trained), grads)
        return jnp.mean(losses), grads, {}  # the mean sends 4 bytes

    def train(self, state: Any, train_loader: Any) -> Any:
        info = super().train(state, train_loader)
        sent = cd.metrics.read(arrays(info.opt_state))
        sent = {x: float(sent[x]) for x in ("syncs", "share")}
        levanter.tracker.log_summary(sent | {"loss": info.loss})
        return info


def without_rows(tree: Any) -> Any:
    """The same arrays, with names as one replica has them."""

    def strip(x):
        if not hax.is_named_array(x):
            return x
        names = tuple(name for name in x.axis_names if name != "replica")
        return hax.NamedArray.tree_unflatten(names, (x.array,))

    return jax.tree.map(strip, tree, is_leaf=hax.is_named_array)


def arrays(tree: Any) -> Any:
    unnamed = lambda x: x.array if hax.is_named_array(x) else x
    return jax.tree.map(unnamed, tree, is_leaf=hax.is_named_array)


def dimension_numbers(model: Any) -> Any:
    """Those of Haliax's linear layers, which know their inputs and outputs by name.

    (The loss tells them too, `cd.dimension_numbers.from_loss`; here is none at hand.)
    """
    is_linear = lambda node: isinstance(node, hax.nn.Linear)
    found = {}
    for path, node in jax.tree.leaves_with_path(model, is_leaf=is_linear):
        if is_linear(node):
            axes = node.weight.axes
            several = lambda side: side if isinstance(side, tuple) else (side,)
            places = [[axes.index(x) for x in several(s)] for s in (node.In, node.Out)]
            numbers = cd.DimensionNumbers(*map(tuple, places))
            found[f"{jax.tree_util.keystr(path)}.weight"] = numbers
    return jax.tree.map_with_path(
        lambda path, _: found.get(jax.tree_util.keystr(path)), arrays(model)
    )


def of_rows(make: Callable[..., Any]) -> optax.GradientTransformationExtraArgs:
    """An optimizer of arrays, with dimension numbers from the names of their axes."""

    def optimizer(params):
        row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        row = jax.tree.map(row, without_rows(params))
        return make(dimension_numbers=dimension_numbers(row))

    def named(state):
        """Levanter would give rows without a name to all devices."""

        def name(x):
            names = ("replica", *(f"axis {i}" for i in range(1, x.ndim)))
            return hax.NamedArray.tree_unflatten(names, (x,))

        rows = jax.tree.map(name, state.rows)
        # Those of one axis are rows, and the others common.
        own = lambda x: name(x) if x.ndim == 1 else x
        return state._replace(rows=rows, counters=jax.tree.map(own, state.counters))

    def init(params):
        return named(optimizer(params).init(arrays(params)))

    def update(grads, state, params=None, **_):
        tx = optimizer(params)
        updates, state = tx.update(arrays(grads), arrays(state), arrays(params))
        structure = jax.tree.structure(grads)
        return jax.tree.unflatten(structure, jax.tree.leaves(updates)), named(state)

    return optax.GradientTransformationExtraArgs(init, update)
