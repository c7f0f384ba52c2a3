"""What a user gives: checked when a site is made, and when it starts."""

from typing import Any

import jax
import jax.numpy as jnp


def check_count(value: Any, what: str) -> None:
    """Rejects what is not a whole number of 1 or more."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{what} must be at least 1 and a Python int, got {value!r}. "
            "Pass a whole number."
        )


def check_params(params: Any) -> None:
    """Rejects what is not trained, and what this site's processes do not all hold."""
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            kind = x.dtype if hasattr(x, "dtype") else type(x).__name__
            raise TypeError(
                f"{name} is {kind}, and no floating-point jax.Array. Give the "
                "parameters alone, without the optimizer's state."
            )
        processes = {device.process_index for device in x.sharding.device_set}
        if len(processes) != jax.process_count():
            raise ValueError(
                f"{name} lies on devices of some of this site's {jax.process_count()} "
                "processes. Give parameters on a mesh of all devices."
            )
