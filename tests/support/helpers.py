"""A tiny problem on replicas, and ways to run an optimizer on it.

Most tests give the gradients instead of a loss: the batch of a training step is a
tree of gradients with a leading replica axis.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import _collectives, _jax_internals, _layout, _mapped, _paths

AXIS = cd.replicas.AXIS
# An array without elements. On CPU JAX 0.11.2 crashes when it compiles a `shard_map` of
# one beside others, the identity even.
NOTHING = {} if jax.__version_info__[:2] == (0, 11) else {"nothing": (0, 3)}


# Two matrices of either orientation, a vector, and an embedding that is no matrix.
SHAPES = {"bias": (5,), "embed": (7, 3), "tall": (6, 4), "wide": (4, 6)}
MATRICES = ("tall", "wide")
# Compiling takes longer than running here. Only for tests with a tolerance.
QUICK: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def make_params(seed: int = 0, dtype: Any = np.float32) -> Any:
    """The parameters of one replica."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def make_gradients(
    steps: int, replicas: int, seed: int = 1, scales: Any = None
) -> list[dict[str, np.ndarray]]:
    """One tree a step, of [replicas, ...] standard normal times the step's scale."""
    rng = np.random.default_rng(seed)
    scales = np.ones(steps) if scales is None else scales
    return [
        {
            name: (scale * rng.normal(size=(replicas, *shape))).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for scale in scales[:steps]
    ]


OF_SYNC = ("axis_name", "allow_unchecked")


def synced_dion(
    learning_rate: Any, rank: Any, trigger: Any, synchronizer: Any, **options: Any
) -> Any:
    """Dion inside `adaptive_sync`."""
    outside = {x: options.pop(x) for x in OF_SYNC if x in options}
    outside["dimension_numbers"] = options.get("dimension_numbers")
    inner = cd.dion(learning_rate, rank, **options)
    return cd.adaptive_sync(inner, trigger, synchronizer, **outside)


def averaging_dion(learning_rate: Any = 0.1, rank: Any = 0.25, **options: Any) -> Any:
    """Local Dion steps; parameters come together on large changes."""
    change = cd.triggers.relative_momentum_change(0.5)
    defaults = {
        "trigger": cd.triggers.at_least_every(change, 20),
        "synchronizer": cd.synchronizers.reconcile(),
        "momentum": 0.9,
    }
    return synced_dion(learning_rate, rank, **{**defaults, **options})


def train_step(tx: Any):
    """A step of one replica whose batch is its gradients."""

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params)
        metrics = {"updates": updates}
        return (optax.apply_updates(params, updates), opt_state), metrics

    return train


def replica_step(tx: Any, mesh: Any, **options: Any) -> Any:
    """`train_step` under `replicas.step`; the batch is [replicas, ...] gradients."""
    train = train_step(tx)

    def local(state, gradients):
        return train(state, jax.tree.map(lambda g: g[0], gradients))

    return cd.replicas.step(local, mesh, **{"donate": False, **options})


def in_shard_map(function: Any, mesh: Any) -> Any:
    """(state, batch) -> results of one replica, for state [replicas, ...]."""

    def body(state, batch):
        state = jax.tree.map(lambda x: x[0], state)
        result = _collectives.vary(function(state, batch), AXIS)
        return jax.tree.map(lambda x: x[None], result)

    spec = PartitionSpec(AXIS)
    return jax.shard_map(
        body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={AXIS}
    )


def manual(function: Any, mesh: Any, state: Any) -> Any:
    """(state, batch) -> (state, metrics) of one replica, jitted under `shard_map`.

    As an update runs in a step: how the state lies is known, and it may communicate.
    """
    like = state
    placed = tuple(
        _layout.Placed(name, x.shape[1:], PartitionSpec(*x.sharding.spec[1:]))
        for name, x in _paths.leaves_with_path(state)
    )

    step = _mapped.MappedStep(mesh, AXIS, placed)
    mapped = in_shard_map(function, mesh)

    def run(state, batch):
        with _mapped.mapping(step):
            new, metrics = mapped(state, batch)
        keep = lambda x, y: jax.lax.with_sharding_constraint(x, y.sharding)
        return jax.tree.map(keep, new, like), metrics

    return jax.jit(run)


def stacked(tx: Any, params: Any, replicas: int) -> Any:
    """(Parameters, optimizer state) of all replicas, on the host."""
    return jax.tree.map(
        lambda x: np.broadcast_to(x, (replicas, *np.shape(x))),
        (params, tx.init(params)),
    )


def start(tx: Any, params: Any, mesh: Any) -> Any:
    """The same as `replicas.replicate` places it, without compiling."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.device_put(stacked(tx, params, mesh.shape[AXIS]), sharding)


def quick(step: Any, *arguments: Any) -> Any:
    """A jitted function compiled in less time, for arguments like these."""
    return step.lower(*arguments).compile(compiler_options=QUICK)


def trace(step: Any, tx: Any, params: Any = None, *, manual: bool = False) -> None:
    """Traces (params, opt_state, gradients) -> (updates, _) of one replica of two.

    In `replicas.step`, or with `manual` where the optimizer's update runs in it: under
    `shard_map`, whose types say what differs between replicas.
    """
    params = make_params() if params is None else params
    state = jax.eval_shape(lambda p: (p, tx.init(p)), params)
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), state
    )

    def body(state, batch):
        return state, step(*state, jax.tree.map(lambda g: g[0], batch))[0]

    mesh = cd.replicas.make_mesh(2)
    if manual:
        mapped = in_shard_map(body, mesh)
    else:
        mapped = cd.replicas.step(body, mesh, donate=False)
    jax.eval_shape(mapped, stacked, stacked[0])


def run_mesh(tx: Any, params: Any, gradients: list) -> Iterator:
    """(params, optimizer state) after each step, on as many devices as replicas."""
    mesh = cd.replicas.make_mesh(replicas_of(gradients))
    state = start(tx, params, mesh)
    step = quick(replica_step(tx, mesh), state, gradients[0])
    for tree in gradients:
        state, _ = step(state, tree)
        yield jax.device_get(state)


def run_vmap(tx: Any, params: Any, gradients: list) -> Iterator:
    """The same on one device, by `jax.vmap(axis_name=...)`."""
    state, step = stacked(tx, params, replicas_of(gradients)), _vmapped(tx)
    for tree in gradients:
        state, _ = step(state, tree)
        state = jax.device_get(state)
        yield state


@functools.lru_cache(maxsize=8)
def _vmapped(tx: Any) -> Any:
    """Compiled once where a test runs one optimizer from several starts."""
    return jax.jit(jax.vmap(train_step(tx), axis_name=AXIS))


def run_alone(tx: Any, params: Any, gradients: list) -> Iterator:
    """The same for one replica, without any axis: gradients without a replica axis."""
    state = (params, tx.init(params))
    step = quick(jax.jit(train_step(tx)), state, gradients[0])
    for tree in gradients:
        state, _ = step(state, tree)
        yield jax.device_get(state)


def replicas_of(gradients: list) -> int:
    return len(next(iter(gradients[0].values())))


def last(trajectory: Iterator) -> Any:
    """The final (params, optimizer state)."""
    return list(trajectory)[-1]


def dion_state(opt_state: Any) -> Any:
    """The one state of Dion in the inner optimizer's."""
    inner = opt_state.inner_state if hasattr(opt_state, "inner_state") else opt_state
    nodes = jax.tree.leaves(inner, is_leaf=lambda x: isinstance(x, cd.DionState))
    (found,) = [node for node in nodes if isinstance(node, cd.DionState)]
    return found


def decisions(trajectory: list) -> list[bool]:
    """Whether each step synchronised, on which all replicas must agree."""
    synced = [np.asarray(state.metrics.synced) for _, state in trajectory]
    assert all((s == s.flat[0]).all() for s in synced)
    return [bool(s.flat[0]) for s in synced]


def slow_but(quick, names):
    """Parameters of a test, of which all but some are slow."""
    return [
        pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names
    ]


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Every leaf of two trees has the same dtype and the same bits."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def program_of(step, *arguments, due=None):
    """The jaxpr of a compiled step of `replicas.step`."""
    program, _ = step._program(step._key(arguments[0]), due)
    return program.trace(*arguments).jaxpr.jaxpr


def equations(jaxpr):
    """All equations of a program, nested ones included."""
    return [each for each, _ in _jax_internals.equations(jaxpr)]
