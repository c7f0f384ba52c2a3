"""Which parameters are matrices, and along which axes, read from the loss."""

# `from_loss` traces the loss. `_reader` follows the parameters through its equations:
# `_primitives` names the handler of each, `_values` and `_axes` have what is known of
# a value, and `_uses` what was found. `_verdict` judges each parameter by its uses.
# `by_name` is a short rule without a loss. `_record` is what an optimizer's state
# keeps of a partition.

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
