"""The optimizer of embeddings, heads, norms and biases, and its learning rate."""

import jax
import optax

from curvadion_jax import _arguments

EPSILON = 1e-7  # of AdamW and Muon; 1e-8, Optax's, is zero in float16


def choose(
    given: optax.GradientTransformation | None,
    learning_rate: optax.ScalarOrSchedule,
    adam_learning_rate: optax.ScalarOrSchedule | None,
    eps: jax.typing.ArrayLike = EPSILON,
    mu_dtype: jax.typing.DTypeLike | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """The optimizer of embeddings, heads, norms and biases; AdamW if none is given.

    Without `adam_learning_rate` AdamW has the learning rate of the matrices.
    """
    _arguments.check_exclusive(
        adam_learning_rate=adam_learning_rate, other_optimizer=given
    )
    _arguments.check_numbers(learning_rate=learning_rate)
    _arguments.check_dtype(mu_dtype, "mu_dtype")
    if given is not None:
        return given
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    _arguments.check_numbers(adam_learning_rate=rate)
    return optax.adamw(
        rate, 0.9, 0.95, eps, weight_decay=0.0, mu_dtype=mu_dtype, nesterov=nesterov
    )
