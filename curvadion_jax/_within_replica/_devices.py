"""The devices of a replica, as inner optimizers are given them."""

import dataclasses
from collections.abc import Mapping

import jax

from curvadion_jax._layout import ONE_DEVICE, Layout
from curvadion_jax._matrices import MatrixView
from curvadion_jax._orthonormalize import Orthonormalize
from curvadion_jax._power_iteration import Named
from curvadion_jax._within_replica import _bases, _by_matrix


@dataclasses.dataclass(frozen=True)
class Devices:
    """How the devices of a replica share the work on its matrices.

    Attributes:
      layout: where parameters lie.
    """

    layout: Layout = ONE_DEVICE

    def whole(self, factor: jax.Array) -> jax.Array:
        """See `Layout.keep_whole`."""
        return self.layout.keep_whole(factor)

    def bases(
        self,
        factors: Named,
        views: dict[str, MatrixView],
        orthonormalize: Orthonormalize,
    ) -> Named:
        """See `_bases.bases`."""
        return _bases.bases(factors, views, orthonormalize, self.layout)

    def by_matrix(
        self,
        function: _by_matrix.Function,
        arrays: Mapping[str, jax.Array],
        views: Mapping[str, MatrixView],
        fewest: float = 1.0,
    ) -> Named:
        """See `_by_matrix.by_matrix`."""
        return _by_matrix.by_matrix(function, arrays, views, self.layout, fewest)
