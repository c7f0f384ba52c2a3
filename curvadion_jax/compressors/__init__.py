"""Compressors decide in what form something is sent."""

from curvadion_jax._payload import Payload
from curvadion_jax.compressors._base import Averaged, Compressor, Posted, exact
from curvadion_jax.compressors._quantize import quantize

__all__ = [
    "Averaged",
    "Compressor",
    "Payload",
    "Posted",
    "exact",
    "quantize",
]
