"""`local_muon_rising` at twice its learning rate, better after all steps on seed 3."""

import optax
from rows import matrices
from simulate import schedule

import curvadion_jax as cd


def optimizer(steps, mesh):
    momentum = optax.linear_schedule(0.8, 0.95, steps)
    return cd.local_muon(
        schedule(0.08, steps), budget=0.01, momentum=momentum, **matrices(mesh)
    )
