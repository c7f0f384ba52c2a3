"""Meshes, and what is done with replicas and their states outside of a step."""

import jax
import jax.numpy as jnp

import curvadion_jax as cd
from curvadion_jax import replicas
from wrong_uses.build import (
    INT,
    OF_DATA,
    PAIR,
    PARAMS,
    TWO,
    anchored,
    counted,
    initialised,
    loaded,
)
from wrong_uses.case import calls, wrong

UNEQUAL = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}
KNOWN = {
    **vars(replicas),
    **{"mesh": TWO, "a_mesh_of_data": OF_DATA, "params": PARAMS, "two_replicas": PAIR},
    **{"jnp": jnp, "jax": jax},
}
_ROWS = [
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
        "reanchor of a state without its parameters",
        lambda: replicas.reanchor(counted()),
        *(ValueError, "must hold an anchor", "give a tree of both, such as a"),
    ),
    wrong(
        "reanchor of a state with two trees like the parameters",
        lambda: replicas.reanchor((PARAMS, PARAMS, counted())),
        *(ValueError, "beside it the parameters", "call the parameters 'params'"),
    ),
]
CASES = calls(KNOWN, _ROWS)
