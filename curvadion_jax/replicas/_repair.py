"""Replaces rows that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _dtypes, _finite, _trees


def repair(rows: Any, anchor: Any = None) -> Any:
    """Replaces rows that are not finite.

    An update adds to parameters, so it cannot mend a NaN in them. A sync excludes such
    a replica, and `curvadion_jax.metrics.read` shows it as excluded again and again;
    what the optimizer keeps of it begins again at a sync by itself.

    Args:
      rows: parameters, or other arrays [R, ...]. A row is not finite if any of its
        arrays holds a NaN or an infinity.
      anchor: what is put in place of such a row, [...], such as
        ``replicas.anchor(opt_state)``. None takes the first row that is finite; if
        none is, nothing can be mended without it, and the rows stay NaN or infinite.

    Returns:
      The rows in their own dtypes, of which no other is changed. Random keys stay.

    Raises:
      ValueError: if `anchor` is no tree like `rows`, or has other shapes.

    Example:
      >>> rows = {"w": jnp.array([[1.0], [jnp.nan], [3.0]])}
      >>> repair(rows)["w"].ravel().tolist()
      [1.0, 1.0, 3.0]
      >>> repair(rows, {"w": jnp.array([2.0])})["w"].ravel().tolist()
      [1.0, 2.0, 3.0]
    """
    if anchor is not None:
        of_one = jax.eval_shape(lambda rows: jax.tree.map(lambda x: x[0], rows), rows)
        if change := _trees.first_change(of_one, anchor, jnp.shape):
            path, wanted, shape = change
            raise ValueError(
                f"anchor {path!r} is {shape}, expected {wanted}. Give what one replica "
                "has."
            )
    return _trees.shared_as(rows, jax.jit(_repaired)(rows, anchor))


def _repaired(rows: Any, anchor: Any) -> Any:
    sound = _finite.rows_finite(rows)
    if anchor is None:
        anchor = jax.tree.map(lambda x: x[jnp.argmax(sound)], rows)
        sound |= ~jnp.any(sound)
    anchor = _dtypes.cast_like(anchor, rows)

    def mended(x, of_anchor):
        if _trees.is_key(x):  # A replica draws its own numbers, and keeps its key.
            return x
        return jnp.where(sound.reshape(-1, *[1] * (x.ndim - 1)), x, of_anchor)

    return jax.tree.map(mended, rows, anchor)
