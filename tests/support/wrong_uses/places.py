"""Meshes, replicas and their states, and steps."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import curvadion_jax as cd
from curvadion_jax import replicas
from wrong_uses.build import PARAMS, initialised
from wrong_uses.case import calls, wrong

AXIS = helpers.AXIS
FOUR = replicas.make_mesh(4)
TWO = replicas.make_mesh(2)
OTHER_NAME = Mesh(np.array(jax.devices()[:2]), ("data",))
PAIR = {"w": jnp.ones((2, 3))}
UNEQUAL = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}


def train(state: Any, batch: Any) -> Any:
    return state, {}


def step(state: Any, batch: Any, function: Any = train, mesh: Mesh = FOUR) -> Any:
    """A step, traced."""
    return jax.eval_shape(replicas.step(function, mesh), state, batch)


def counted() -> Any:
    """The state of one replica."""
    return cd.curvadion(0.1).init(PARAMS)


def anchored(number: int = 2) -> Any:
    return jax.tree.map(
        lambda x: np.broadcast_to(x, (number, *np.shape(x))), (PARAMS, counted())
    )


def loaded() -> Any:
    return {name: x + 1 for name, x in PARAMS.items()}


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


KNOWN = {
    **vars(replicas),
    **{"train": train, "mesh": TWO, "params": PARAMS, "two_replicas": PAIR},
    **{"a_mesh_of_data": OTHER_NAME, "jnp": jnp, "jax": jax},
}
INT = "must be an int"
_CALLS = [
    (
        "make_mesh(9)",
        ValueError,
        "there are 8",
        'call jax.config.update("jax_num_cpu_devices", 9)',
    ),
    ("make_mesh(3, {'fsdp': 3})", ValueError, "needs 9 devices", "before anything"),
    ("make_mesh(0)", ValueError, "got 0", "'replica' must be at least 1"),
    ("make_mesh(2, {'tp': -1})", ValueError, "got -1", "'tp' must be at least 1"),
    ("make_mesh(2.0)", TypeError, "got 2.0", INT),
    ("make_mesh(True)", TypeError, "got True", INT),
    ("make_mesh('2')", TypeError, "got '2'", INT),
    ("make_mesh(2, {'tp': '2'})", TypeError, "got '2'", "'tp' must be an int"),
    ("make_mesh(2, 4)", TypeError, "got 4", 'such as {"fsdp": 4}'),
    ("make_mesh(2, {'replica': 4})", ValueError, "'replica'", "rename the inner one"),
    ("make_mesh(2, axis_name=3)", TypeError, "got 3", "axis_name must be a string"),
    (
        "make_mesh(2, {'fsdp': 2}, inner_type='explicit')",
        *(ValueError, "got 'explicit'", "must be jax.sharding.AxisType.Auto or"),
    ),
    ("make_mesh(2, devices='cpu')", TypeError, "got 'cpu'", "such as jax.devices('cp"),
    ("replicate(params, 2)", TypeError, "got 2", "must be a jax.sharding.Mesh"),
    (
        "replicate(params, a_mesh_of_data)",
        *(ValueError, "axes ('data',) and no 'replica'", "make it with curvadion_jax"),
    ),
    (
        "replicate(params, mesh, axis_name='pod')",
        *(ValueError, "axes ('replica',) and no 'pod'", "or pass axis_name"),
    ),
    (
        "replicate(params, jax.make_mesh((2, 2), ('replica', 'fsdp')))",
        *(
            ValueError,
            "'replica' is of type AxisType.Explicit",
            "Make the mesh with",
        ),
    ),
    (
        "replicate(replicate(params, mesh), mesh)",
        *(
            ValueError,
            "divided over 'replica' already",
            "give replicate the state of one rep",
        ),
    ),
    (
        "replicate({'name': 'mlp'}, mesh)",
        *(TypeError, "['name'] is 'mlp'", "keep all else out of it"),
    ),
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
    ("consensus({})", ValueError, "a tree without arrays", "give what replicas.repl"),
    (
        "consensus({'w': jnp.ones(())})",
        ValueError,
        "['w']",
        "give what replicas.replicate",
    ),
    ("divergence({})", ValueError, "a tree without arrays", "give what replicas.repl"),
    (
        "divergence(params)",
        *(
            ValueError,
            "['embed'] has shape (7, 3)",
            "replicate() gives all of them one",
        ),
    ),
    ("resize(two_replicas, 4)", TypeError, "got 4", "must be a jax.sharding.Mesh"),
    ("resize({'w': 1.0}, mesh)", ValueError, "got 1.0", "give what replicas.replica"),
    (
        "resize(params, mesh)",
        *(ValueError, "['embed'] has shape (7, 3)", "see replicas.replicate"),
    ),
    ("mend('state')", ValueError, "got 'state'", "give what replicas.replicate"),
    (
        "mend(params)",
        *(ValueError, "['embed'] has shape (7, 3)", "see replicas.replicate"),
    ),
    (
        "mend({'w': jax.device_get(two_replicas['w'])})",
        *(TypeError, "'w' is a ndarray", "mend what replicas.replicate or a step"),
    ),
    (
        "mend({'w': jnp.full((3, 2), jnp.nan)})",
        *(ValueError, "none of the 3 replicas is finite", "restore a checkpoint"),
    ),
    (
        "mend(two_replicas, 'all')",
        *(TypeError, "got 'all'", "numbers of replicas such as [3]"),
    ),
    (
        "mend(two_replicas, [0.5])",
        *(TypeError, "got 0.5", "numbers of replicas such as [3]"),
    ),
    (
        "mend(two_replicas, [2])",
        *(ValueError, "there is no replica 2", "give numbers from 0 to 1"),
    ),
    (
        "mend(two_replicas, [0, 1])",
        *(ValueError, "leaves none of the 2 replicas", "leave one of them out"),
    ),
    (
        "offload(params)",
        *(
            ValueError,
            "the state holds no array of a synchronizer",
            "Give the state of",
        ),
    ),
]
_STEPS = [
    wrong(
        "a step whose state has no replica axis",
        lambda: step(PARAMS, jnp.ones(4)),
        *(ValueError, "the state['bias'] has shape (5,)", "make it with replicate()"),
    ),
    wrong(
        "a step for 4 with a scalar in the state",
        lambda: step({"w": jnp.ones(())}, jnp.ones(4)),
        *(ValueError, "state['w'] has shape ()", "make it with replicate()"),
    ),
    wrong(
        "a step for 4 with the state of 2 replicas",
        lambda: step(PAIR, jnp.ones(4)),
        *(ValueError, "has shape (2, 3), and not a leading axis of 4", "make it with"),
    ),
    wrong(
        "a batch of 6 rows for 4 replicas",
        lambda: step(jnp.ones(4), {"x": jnp.ones((6, 4))}),
        *(
            ValueError,
            "batch['x'] of shape (6, 4)",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a batch without rows",
        lambda: step(jnp.ones(4), jnp.ones((0, 4))),
        *(
            ValueError,
            "the batch of shape (0, 4)",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a number as the batch",
        lambda: step(jnp.ones(4), 3.0),
        *(
            ValueError,
            "the batch of shape ()",
            "give the global batch, of a multiple of 4 rows",
        ),
    ),
    wrong(
        "a training step that returns the state alone",
        lambda: step(PAIR, jnp.ones(2), lambda state, batch: state, TWO),
        *(TypeError, "got a dict", "must return (state, metrics)"),
    ),
    wrong(
        "a training step that returns (params, opt_state) alone",
        lambda: step((PAIR, PAIR), jnp.ones(2), lambda state, batch: state, TWO),
        *(TypeError, "got the state alone", "return {} as the metrics"),
    ),
    wrong(
        "a training step that returns nothing",
        lambda: step(PAIR, jnp.ones(2), lambda state, batch: None, TWO),
        *(TypeError, "got a NoneType", "must return (state, metrics)"),
    ),
    wrong(
        "a training step that returns three things",
        lambda: step(PAIR, jnp.ones(2), lambda state, batch: (state, {}, {}), TWO),
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
        "consensus of leaves with other numbers of replicas",
        lambda: replicas.consensus(UNEQUAL),
        *(ValueError, "['b'] has shape (3, 3)", "replicate() gives all of them one"),
    ),
    wrong(
        "divergence of leaves with other numbers of replicas",
        lambda: replicas.divergence(UNEQUAL),
        *(ValueError, "['b'] has shape (3, 3)", "replicate() gives all of them one"),
    ),
    wrong(
        "consensus(params, opt_state) of other parameters",
        lambda: replicas.consensus(PAIR, anchored()[1]),
        *(ValueError, "holds 1 anchor(s)", "pass the parameters that this optimizer"),
    ),
    wrong(
        "consensus(opt_state, params)",
        lambda: replicas.consensus(anchored()[1], anchored()[0]),
        *(ValueError, "the first argument holds an optimizer's", "give the parameters"),
    ),
    wrong(
        "consensus(params, opt_state) of a state that was never replicated",
        lambda: replicas.consensus(anchored()[0], counted()),
        *(ValueError, "the optimizer state has no replica axis", "give what replicas"),
    ),
    wrong(
        "consensus(params, opt_state) of two optimizers",
        lambda: replicas.consensus(anchored()[0], [anchored()[1], anchored()[1]]),
        *(ValueError, "holds 2 anchor(s)", "pass the parameters that this optimizer"),
    ),
    wrong(
        "offload of a state that is not on devices",
        lambda: replicas.offload(initialised(cd.curvadion(0.1))),
        *(TypeError, "is a ShapeDtypeStruct", "move what curvadion_jax.replicas.repl"),
    ),
    wrong(
        "replicate of parameters that were loaded after tx.init",
        lambda: replicas.replicate((loaded(), counted()), TWO),
        *(
            ValueError,
            "the parameters ('bias') are not those",
            "call tx.init with the parameters that training starts from",
        ),
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
    wrong(
        "reanchor of a state without its parameters",
        lambda: replicas.reanchor(counted()),
        *(ValueError, "must hold the parameters", "give a tree of both, such as a"),
    ),
]
CASES = calls(KNOWN, [*_CALLS, *_STEPS])
