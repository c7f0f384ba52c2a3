"""Parameters, gradients and states of another tree, shape or kind."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import curvadion_jax as cd
from curvadion_jax import outer
from wrong_uses.build import PARAMS, initialised, parts, updated
from wrong_uses.case import wrong

FEWER = {name: leaf for name, leaf in PARAMS.items() if name != "bias"}
RENAMED = {name.replace("bias", "offset"): leaf for name, leaf in PARAMS.items()}
WIDER = {**PARAMS, "bias": jnp.zeros(9)}


def of_dtype(dtype: Any, name: str = "bias") -> dict[str, jax.Array]:
    return {**PARAMS, name: jnp.ones(PARAMS[name].shape, dtype)}


def without_parameters(tx: Any) -> Any:
    return tx.update(PARAMS, initialised(tx))


CASES = [
    wrong(
        "curvadion(0.1).update(gradients, state), without parameters",
        lambda: without_parameters(cd.curvadion(0.1)),
        *(ValueError, "got params=None", "call update(gradients, state, params)"),
    ),
    wrong(
        "dion(0.1).update(gradients, state), without parameters",
        lambda: without_parameters(cd.dion(0.1)),
        *(ValueError, "got params=None", "call update(gradients, state, params)"),
    ),
    wrong(
        "outer.orthonormal().update(updates, state), without parameters",
        lambda: without_parameters(outer.orthonormal()),
        *(ValueError, "got params=None", "call update(updates, state, params)"),
    ),
    wrong(
        "gradients without that of the bias",
        lambda: updated(cd.curvadion(0.1), FEWER),
        *(ValueError, "there is no gradient of 'bias'", "give update(gradients, state"),
    ),
    wrong(
        "gradients with one of another name, for dion",
        lambda: updated(cd.dion(0.1), RENAMED | PARAMS),
        *(ValueError, "'offset' belongs to no parameter", "give update(gradients"),
    ),
    wrong(
        "gradients in a list",
        lambda: updated(parts(), [PARAMS]),
        *(
            ValueError,
            "there is no gradient of 'bias'",
            "must be trees of the same structure",
        ),
    ),
    wrong(
        "a gradient of another shape",
        lambda: updated(parts(), WIDER),
        *(ValueError, "'bias' has shape (9,), the parameter (5,)", "differentiate"),
    ),
    wrong(
        "a gradient of another shape, for dion",
        lambda: updated(cd.dion(0.1), {**PARAMS, "tall": PARAMS["tall"].T}),
        *(ValueError, "'tall' has shape (4, 6), the parameter (6, 4)", "differentiate"),
    ),
    wrong(
        "gradients of integers",
        lambda: updated(parts(), of_dtype("int32")),
        *(TypeError, "'bias' has dtype int32", "give real floating-point gradients"),
    ),
    wrong(
        "complex gradients",
        lambda: updated(parts(), of_dtype("complex64")),
        *(TypeError, "dtype complex64", "give real floating-point gradients"),
    ),
    *(
        wrong(
            f"a parameter of {dtype}",
            lambda dtype=dtype: updated(parts(), params=of_dtype(dtype)),
            *(
                TypeError,
                f"'bias' has dtype {dtype}",
                "Keep others out of what init",
            ),
        )
        for dtype in ("int32", "bool", "complex64")
    ),
    *(
        wrong(
            f"a matrix of {dtype} for Dion",
            lambda dtype=dtype: initialised(
                cd.curvadion(0.1, rank=0.25), of_dtype(dtype, "tall")
            ),
            *(TypeError, f"got {dtype} for 'tall'", "needs real floating-point arrays"),
        )
        for dtype in ("int32", "complex64")
    ),
    wrong(
        "a number among the parameters",
        lambda: cd.curvadion(0.1).init({"scale": 1.0}),
        *(TypeError, "'scale' is 1.0", "give the tree that the model's init returned"),
    ),
    wrong(
        "a text among the parameters",
        lambda: cd.dion(0.1).init({"name": "mlp"}),
        *(TypeError, "'name' is 'mlp'", "give the tree that the model's init returned"),
    ),
    wrong(
        "curvadion's state of parameters without bias",
        lambda: updated(cd.curvadion(0.1), initial=FEWER),
        *(ValueError, "/bias' of the optimizer state is missing", "give update the st"),
    ),
    wrong(
        "curvadion's state of a wider bias",
        lambda: updated(cd.curvadion(0.1), initial=WIDER),
        *(ValueError, "is of shape (9,)", "give update the state that init made"),
    ),
    wrong(
        "dion's state of other names",
        lambda: updated(cd.dion(0.1), initial=RENAMED),
        *(ValueError, "/bias' of the optimizer state is missing", "give update the st"),
    ),
    wrong(
        "dion's state of a transposed matrix",
        lambda: updated(cd.dion(0.1), initial={**PARAMS, "tall": PARAMS["tall"].T}),
        *(ValueError, "is of shape (4, 6)", "give update the state that init made"),
    ),
    wrong(
        "AdamW's state for curvadion",
        lambda: cd.curvadion(0.1).update(PARAMS, optax.adamw(1).init(PARAMS), PARAMS),
        *(TypeError, "got a tuple", "call update(gradients, state, params) with what"),
    ),
    wrong(
        "dion(0.1).update(gradients, params, state), swapped",
        lambda: cd.dion(0.1).update(PARAMS, PARAMS, initialised(cd.dion(0.1))),
        *(TypeError, "got a dict", "call update(gradients, state, params)"),
    ),
    wrong(
        "update(..., weight=-1)",
        lambda: updated(parts(), weight=-1),
        *(ValueError, "got -1", "weight must be finite and not negative"),
    ),
    wrong(
        "update(..., weight='1')",
        lambda: updated(parts(), weight="1"),
        *(TypeError, "got '1'", "weight must be one number"),
    ),
    wrong(
        "update(..., weight=True)",
        lambda: updated(parts(), weight=True),
        *(TypeError, "got True", "weight must be one number"),
    ),
    wrong(
        "update(..., weight=[1, 1])",
        lambda: updated(parts(), weight=jnp.ones(2)),
        *(TypeError, "got Array([1., 1.]", "weight must be one number"),
    ),
    wrong(
        "dimension_numbers that are no tree of the parameters",
        lambda: initialised(cd.dion(0.1, dimension_numbers=[None])),
        *(ValueError, "got a list", "pass a function of the parameters instead"),
    ),
    wrong(
        "dimension_numbers='dion'",
        lambda: initialised(cd.dion(0.1, dimension_numbers="dion")),
        *(TypeError, "got 'dion'", "must hold optax.contrib.MuonDimensionNumbers"),
    ),
    wrong(
        "dimension_numbers that name an axis of a vector",
        lambda: initialised(
            cd.dion(0.1, dimension_numbers=lambda params: cd.DimensionNumbers(0, 1))
        ),
        *(ValueError, "axis 1 does not exist in 1 dim", "give the parameter None"),
    ),
    wrong(
        "an attention kernel of three axes with nothing that tells them",
        lambda: initialised(
            cd.dion(0.1), {"attention": {"query": {"kernel": jnp.ones((8, 2, 4))}}}
        ),
        *(ValueError, "of shape (8, 2, 4)", "pass dimension_numbers to say which"),
    ),
    wrong(
        "two parameters of one path",
        lambda: initialised(
            cd.dion(0.1), {"a/b": jnp.ones(3), "a": {"b": jnp.ones((2, 3))}}
        ),
        *(ValueError, "the path 'a/b'", "rename one, without slashes in its name"),
    ),
]
