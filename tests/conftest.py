"""Eight CPU devices, before JAX touches one; fixed numerics for every test."""

import os

# Small factorisations are many times faster without OpenBLAS's own threads, which
# would compete with the eight devices of this process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
