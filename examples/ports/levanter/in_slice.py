"""`local_muon` inside one slice: a Levanter trainer whose model has rows.

python examples/ports/levanter/in_slice.py --replicas 2

A row, a replica's parameters, is an axis `replica` of Haliax and of the mesh, so
Levanter places and saves it as it does other axes. Ours are the gradients, taken
inside `cd.replicas.map`, and the optimizer.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import command  # noqa: E402
import upstream  # noqa: E402

INSIDE = 2  # devices of a replica


def main(arguments: list[str] | None = None) -> dict:
    parser = command.parser(__doc__, "local_muon")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/in_slice"))
    parser.add_argument("--folder", type=Path, default=command.DOWNLOADS)
    options, more = parser.parse_known_args(arguments)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    sys.path.insert(0, str(upstream.levanter(options.folder, patched=True)))

    import jax

    jax.config.update("jax_num_cpu_devices", options.replicas * INSIDE)
    import main as port
    from levanter.main import train_lm
    from levanter.models.gpt2 import Gpt2Config
    from levanter.optim.config import OptimizerConfig

    import curvadion_jax as cd

    config = port.tiny(more, steps=options.steps, out=options.out)
    config.site = None
    # Llama computes its rotary embeddings while it is traced, which JAX 0.10.2 cannot
    # inside a shard_map over some of the axes of the mesh in use.
    config.model = Gpt2Config(
        max_seq_len=128,
        hidden_dim=64,
        num_layers=2,
        num_heads=4,
        gradient_checkpointing=False,
        tokenizer=config.model.tokenizer,
    )
    del config.data.components["text"].datasets["validation"]  # it would see rows
    ours = options.optimizer == "local_muon"
    if ours:
        config.trainer.mesh = in_replicas(config.trainer.mesh, options.replicas)
        mesh = config.trainer.device_mesh

        @dataclasses.dataclass(frozen=True)
        class LocalMuonConfig(OptimizerConfig):
            budget: float = 0.02

            def build(self, num_train_steps):
                schedule = self.lr_scheduler(num_train_steps)
                specs = jax.sharding.PartitionSpec()  # devices share the batch alone
                return of_rows(
                    lambda numbers: cd.local_muon(
                        schedule,
                        self.budget,
                        dimension_numbers=numbers,
                        mesh=mesh,
                        specs=specs,
                    )
                )

        config.optimizer = LocalMuonConfig(learning_rate=options.rate or 0.02)
        train_lm.Trainer = replica_trainer(options.replicas)
    states = []
    made = train_lm.Trainer

    class Trainer(made):
        def train(self, state, train_loader):
            states.append(super().train(state, train_loader))
            return states[-1]

    train_lm.Trainer = Trainer
    train_lm.main(config)
    (info,) = states
    sent = cd.metrics.read(info.opt_state) if ours else {}
    return command.report(options, sent, loss=info.loss)


def in_replicas(mesh: Any, replicas: int) -> Any:
    """A Levanter mesh config with replicas, whose devices share their batch."""
    return dataclasses.replace(
        mesh,
        axes={"replica": replicas, "data": INSIDE},
        compute_mapping={"batch": ["data"]},
        param_mapping={"replica": "replica"},
    )


def replica_trainer(replicas: int) -> type:
    """Levanter's trainer, of a model with rows."""
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from levanter.trainer import Trainer

    import curvadion_jax as cd

    Replica = hax.Axis("replica", replicas)

    class ReplicaTrainer(Trainer):
        def initial_state(self, training_key, model=None, model_init=None, **given):
            def rows():
                add = lambda x: (
                    x.broadcast_axis(Replica) if hax.is_named_array(x) else x
                )
                return jax.tree.map(add, model_init(), is_leaf=hax.is_named_array)

            return super().initial_state(training_key, model_init=rows, **given)

        def _compute_gradients_microbatched(self, loss_fn, model, *batch, key, **named):
            mesh = self.device_mesh
            trained = eqx.filter(model, eqx.is_inexact_array)
            one, rest = eqx.partition(without_rows(model), eqx.is_inexact_array)
            one = jax.tree.structure(one)
            batches, inputs = jax.tree.flatten((batch, named))

            def of_one(leaves, batches, key):
                model = eqx.combine(jax.tree.unflatten(one, leaves), rest)
                batch, named = jax.tree.unflatten(inputs, batches)
                run = eqx.filter_value_and_grad(loss_fn, has_aux=True)
                (loss, _), grads = run(model, *batch, key=key, **named)
                return loss, jax.tree.leaves(grads)

            losses, grads = cd.replicas.map(of_one, mesh)(
                jax.tree.leaves(trained),
                cd.replicas.split(batches, mesh),
                jax.random.split(key, replicas),
            )
            grads = jax.tree.unflatten(jax.tree.structure(trained), grads)
            return jnp.mean(losses), grads, {}

    return ReplicaTrainer


def without_rows(tree: Any) -> Any:
    """The same arrays, with names as one replica has them."""
    import haliax as hax
    import jax

    def strip(x):
        if not hax.is_named_array(x):
            return x
        names = tuple(name for name in x.axis_names if name != "replica")
        return hax.NamedArray.tree_unflatten(names, (x.array,))

    return jax.tree.map(strip, tree, is_leaf=hax.is_named_array)


def of_rows(make: Any) -> Any:
    """An optimizer of rows, made with dimension numbers from the names of axes."""
    import haliax as hax
    import jax
    import optax

    import curvadion_jax as cd

    def arrays(tree):
        unnamed = lambda x: x.array if hax.is_named_array(x) else x
        return jax.tree.map(unnamed, tree, is_leaf=hax.is_named_array)

    def optimizer(params):
        row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        row = jax.tree.map(row, without_rows(params))
        return make(arrays(cd.dimension_numbers.haliax(row)))

    def update(grads, state, params=None, **_):
        tx = optimizer(params)
        updates, state = tx.update(arrays(grads), state, arrays(params))
        structure = jax.tree.structure(grads)
        return jax.tree.unflatten(structure, jax.tree.leaves(updates)), state

    init = lambda params: optimizer(params).init(arrays(params))
    return optax.GradientTransformationExtraArgs(init, update)


if __name__ == "__main__":
    main()
