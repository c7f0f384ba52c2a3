"""MuLoCo's momentum and outer step of one worker, with `local_muon`'s syncs."""

import optax
from rows import matrices
from simulate import schedule

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers


def optimizer(steps, mesh):
    synchronizer = synchronizers.reconcile(
        optax.sgd(0.7, 0.6, nesterov=True), compressor=compressors.quantize(2)
    )
    return cd.local_muon(
        schedule(0.04, steps),
        budget=0.01,
        momentum=0.95,
        synchronizer=synchronizer,
        **matrices(mesh),
    )
