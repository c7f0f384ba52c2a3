"""`replicas.step`: its arguments, states and batches, and what it runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import curvadion_jax as cd
from curvadion_jax import replicas
from wrong_uses.build import OF_DATA, PAIR, PARAMS, TWO, loaded
from wrong_uses.case import calls, wrong

FOUR = replicas.make_mesh(4)


def train(state: Any, batch: Any) -> Any:
    return state, {}


def traced(state: Any, batch: Any, function: Any = train, mesh: Mesh = FOUR) -> Any:
    return jax.eval_shape(replicas.step(function, mesh), state, batch)


def started_apart() -> Any:
    """Replicas of which each has made its own parameters."""
    tx = cd.curvadion(0.1)
    states = [(params, tx.init(params)) for params in (PARAMS, loaded())]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def donated() -> Any:
    state = replicas.replicate({"w": jnp.ones(3)}, TWO)
    state["w"].delete()
    return state


def elsewhere() -> None:
    state = replicas.replicate(PAIR, replicas.make_mesh(4, devices=jax.devices()[4:]))
    replicas.step(train, FOUR)(state, jnp.ones(4))


KNOWN = {"step": replicas.step, "train": train, "mesh": TWO, "a_mesh_of_data": OF_DATA}
_ROWS = [
    ("step(train, 8)", TypeError, "got 8", "must be a jax.sharding.Mesh"),
    (
        "step(mesh, train)",
        TypeError,
        "got <function train",
        "must be a jax.sharding.Mesh",
    ),
    (
        "step(train, a_mesh_of_data)",
        *(ValueError, "axes ('data',) and no 'replica'", "make it with curvadion_jax"),
    ),
    ("step(train, mesh, donate='no')", TypeError, "got 'no'", "must be True or False"),
    wrong(
        "a step whose state has no replica axis",
        lambda: traced(PARAMS, jnp.ones(4)),
        *(ValueError, "the state['bias'] has shape (5,)", "make it with replicate()"),
    ),
    wrong(
        "a step for 4 with a scalar in the state",
        lambda: traced({"w": jnp.ones(())}, jnp.ones(4)),
        *(ValueError, "state['w'] has shape ()", "make it with replicate()"),
    ),
    wrong(
        "a step for 4 with the state of 2 replicas",
        lambda: traced(PAIR, jnp.ones(4)),
        *(ValueError, "has shape (2, 3), and not a leading axis of 4", "make it with"),
    ),
    wrong(
        "a batch of 6 rows for 4 replicas",
        lambda: traced(jnp.ones(4), {"x": jnp.ones((6, 4))}),
        *(
            ValueError,
            "batch['x'] of shape (6, 4)",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a batch without rows",
        lambda: traced(jnp.ones(4), jnp.ones((0, 4))),
        *(
            ValueError,
            "the batch of shape (0, 4)",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a number as the batch",
        lambda: traced(jnp.ones(4), 3.0),
        *(
            ValueError,
            "the batch of shape ()",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a training step that returns the state alone",
        lambda: traced(PAIR, jnp.ones(2), lambda state, batch: state, TWO),
        *(TypeError, "got a dict", "must return (state, metrics)"),
    ),
    wrong(
        "a training step that returns (params, opt_state) alone",
        lambda: traced((PAIR, PAIR), jnp.ones(2), lambda state, batch: state, TWO),
        *(TypeError, "got the state alone", "return {} as the metrics"),
    ),
    wrong(
        "a training step that returns nothing",
        lambda: traced(PAIR, jnp.ones(2), lambda state, batch: None, TWO),
        *(TypeError, "got a NoneType", "must return (state, metrics)"),
    ),
    wrong(
        "a training step that returns three things",
        lambda: traced(PAIR, jnp.ones(2), lambda state, batch: (state, {}, {}), TWO),
        *(TypeError, "got a tuple of 3", "must return (state, metrics)"),
    ),
    wrong(
        "a state that an earlier step reused",
        lambda: replicas.step(train, TWO)(donated(), jnp.ones(2)),
        *(ValueError, "the state['w'] was used in an earlier step", "use the state t"),
    ),
    wrong(
        "the consensus of a state that an earlier step reused",
        lambda: replicas.consensus(donated()),
        *(ValueError, "parameters['w'] was used in an earlier", "use the state that"),
    ),
    wrong(
        "a state on other devices than the step's",
        elsewhere,
        *(ValueError, "lies on the mesh {'replica': 4}", "restore the state onto the"),
    ),
    wrong(
        "a step of replicas that start from different parameters",
        lambda: replicas.step(train, TWO)(started_apart(), jnp.ones(2)),
        *(
            ValueError,
            "different parameters ('bias')",
            "give replicas.replicate the state of one replica",
        ),
    ),
]
CASES = calls(KNOWN, _ROWS)
