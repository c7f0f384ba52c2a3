"""Which parameters are matrices, along which axes: the loss's program tells."""

from curvadion_jax.dimension_numbers._by_name import by_name
from curvadion_jax.dimension_numbers._from_loss import from_loss
from curvadion_jax.dimension_numbers._partition import (
    DimensionNumbers,
    Finding,
    Partition,
    PartitionWarning,
)

__all__ = [
    "DimensionNumbers",
    "Finding",
    "Partition",
    "PartitionWarning",
    "by_name",
    "from_loss",
]
