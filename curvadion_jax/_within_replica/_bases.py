"""Orthonormal bases of the left factors of all parameters, shared out over devices."""

from curvadion_jax import _power_iteration
from curvadion_jax._layout import Layout
from curvadion_jax._matrices import MatrixView, make_view
from curvadion_jax._orthonormalize import Orthonormalize, cholesky_qr
from curvadion_jax._power_iteration import Named
from curvadion_jax._within_replica._by_matrix import by_matrix


def bases(
    factors: Named,
    views: dict[str, MatrixView],
    orthonormalize: Orthonormalize,
    layout: Layout,
) -> Named:
    """Bases of left factors; inside a replica every device makes some of them.

    Left to itself the compiler has each device do all, where the axis divides the
    matrix along its other side: more work than the products of a divided matrix. What
    a function of the user's needs is not known: constraints by inner axes, say.

    Args:
      factors: path of the parameter -> [*batch, rows, r].
      views: how each is seen as matrices.
      orthonormalize: see `_orthonormalize`.
      layout: where parameters lie.
    """
    if not layout.axes or orthonormalize is not cholesky_qr:
        return _power_iteration.bases(factors, orthonormalize)
    made_of = {name: (view.shape, view.p_axes) for name, view in views.items()}
    found = by_matrix(
        lambda stacks: _power_iteration.bases_of_stacks(
            [stack.array for stack in stacks], orthonormalize
        ),
        factors,
        {name: make_view(x.shape, -2, -1) for name, x in factors.items()},
        layout.of_factors(factors, made_of),
    )
    return {name: layout.keep_whole(found[name]) for name in factors}
