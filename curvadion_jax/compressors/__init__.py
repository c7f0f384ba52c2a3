"""Compressors decide in what form something is sent."""

from curvadion_jax._payload import Payload
from curvadion_jax.compressors._base import Averaged, Compressor, Posted, exact
from curvadion_jax.compressors._chain import chain
from curvadion_jax.compressors._low_rank import low_rank
from curvadion_jax.compressors._quantize import quantize
from curvadion_jax.compressors._top_k import top_k

__all__ = [
    "Averaged",
    "Compressor",
    "Payload",
    "Posted",
    "chain",
    "exact",
    "low_rank",
    "quantize",
    "top_k",
]
