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

import curvadion_jax as cd
from curvadion_jax.step import _one_branch

AXIS = cd.replicas.AXIS
when = _one_branch.when  # programs of a local step, and of a sync
# An array without elements. On CPU JAX 0.11.2 crashes when it compiles a `shard_map` of
# one beside others, the identity even.
NOTHING = {} if jax.__version_info__[:2] == (0, 11) else {"nothing": (0, 3)}


# Two matrices of either orientation, a vector, and an embedding that is no matrix.
SHAPES = {
    "bias": (5,),
    "embed/embedding": (7, 3),
    "tall/kernel": (6, 4),
    "wide/kernel": (4, 6),
}
MATRICES = ("tall/kernel", "wide/kernel")
# Compiling takes longer than running here. Only for tests with a tolerance.
QUICK: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def make_params(seed: int = 0, dtype: Any = np.float32) -> Any:
    """The parameters of one replica."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


def matrices(params: Any) -> Any:
    """Dimension numbers: all but vectors and embeddings are [..., fan_in, fan_out]."""

    def numbers(path, x):
        other = x.ndim < 2 or "embed" in jax.tree_util.keystr(path)
        return None if other else cd.DimensionNumbers(-2, -1)

    return jax.tree.map_with_path(numbers, params)


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


OF_SYNC = ("mesh", "before", "specs")


def synced_dion(
    learning_rate: Any, rank: Any, trigger: Any, synchronizer: Any, **options: Any
) -> Any:
    """Dion inside `adaptive_sync`."""
    outside = {x: options.pop(x) for x in OF_SYNC if x in options}
    inner = cd.dion(learning_rate, rank=rank, **options)
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
    """A step of rows whose batch is their gradients, [R, ...]."""

    def train(state, gradients, **extra):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), opt_state), {"updates": updates}

    return train


def start(tx: Any, params: Any, mesh: Any) -> Any:
    """(Parameters, optimizer state) of all replicas."""
    rows = cd.replicas.replicate(params, mesh)
    return rows, tx.init(rows)


def quick(step: Any, *arguments: Any, **named: Any) -> Any:
    """A jitted function compiled in less time, for arguments like these."""
    return step.lower(*arguments, **named).compile(compiler_options=QUICK)


def run(
    tx: Any,
    mesh: Any,
    params: Any,
    gradients: list,
    change: Any = None,
    **extra: Any,
) -> Iterator:
    """(params, optimizer state) after each step of an optimizer made for this mesh.

    Extra arguments are lists too, of one for each step. `change` maps (index, state on
    the host) to the state that a step starts with.
    """
    state = start(tx, params, mesh)
    each = [{k: v[i] for k, v in extra.items()} for i in range(len(gradients))]
    first = {k: v[0] for k, v in extra.items()}
    step = quick(_jitted(tx), state, gradients[0], **first)
    for index, (tree, more) in enumerate(zip(gradients, each, strict=True)):
        if change is not None:
            changed = change(index, jax.tree.map(np.array, jax.device_get(state)))
            place = lambda x, old: jax.device_put(x, old.sharding)
            state = jax.tree.map(place, changed, state)
        state, _ = step(state, tree, **more)
        yield jax.device_get(state)


@functools.lru_cache(maxsize=8)
def _jitted(tx: Any) -> Any:
    """Traced once where a test runs one optimizer from several starts."""
    return jax.jit(train_step(tx))


def run_mesh(make: Any, params: Any, gradients: list, **extra: Any) -> Iterator:
    """`run` on as many devices as replicas, of ``make(mesh)``."""
    mesh = cd.replicas.make_mesh(replicas_of(gradients))
    return run(make(mesh), mesh, params, gradients, **extra)


def run_simulated(make: Any, params: Any, gradients: list, **extra: Any) -> Iterator:
    """`run` of all replicas on one device, of ``make(mesh)``."""
    mesh = cd.replicas.simulated(replicas_of(gradients))
    return run(make(mesh), mesh, params, gradients, **extra)


def run_alone(make: Any, params: Any, gradients: list, **extra: Any) -> Iterator:
    """`run` of one replica, whose gradients have no replica axis."""
    return run(make(None), None, params, gradients, **extra)


def replicas_of(gradients: list) -> int:
    return len(next(iter(gradients[0].values())))


def last(trajectory: Iterator) -> Any:
    """The final (params, optimizer state)."""
    return list(trajectory)[-1]


def dion_state(opt_state: Any) -> Any:
    """The one state of Dion in the inner optimizer's."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, cd.DionState))
    (found,) = [node for node in nodes if isinstance(node, cd.DionState)]
    return found


def decisions(trajectory: list) -> list[bool]:
    """Whether each step synchronised."""
    return [int(state.counters.since) == 0 for _, state in trajectory]


def equations(jaxpr: Any) -> list:
    """All equations of a program, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        is_program = lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=is_program):
            if is_program(inner):
                found += equations(getattr(inner, "jaxpr", inner))
    return found


def mesh_of(kind: str, replicas: int) -> Any:
    """Replicas that share a device, or have one each."""
    make = {"simulated": cd.replicas.simulated, "mesh": cd.replicas.make_mesh}[kind]
    return make(replicas)


def slow_but(quick, names):
    """Parameters of a test, of which all but some are slow."""
    return [
        pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in names
    ]


def bytes_sent(message: cd.replicas.Message, replicas: int) -> float:
    """By one device; of an all-reduce twice the share of what codes cross in."""
    twice = 1 + (message.kind == "all-reduce")
    return twice * message.bytes * (replicas - 1) / replicas


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Every leaf of two trees has the same dtype and the same bits."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
