"""The library's recommended method, with a momentum that rises."""

import optax
from rows import matrices
from simulate import schedule

import curvadion_jax as cd


def optimizer(steps, mesh):
    momentum = optax.linear_schedule(0.8, 0.95, steps)
    return cd.local_muon(
        schedule(0.04, steps), budget=0.01, momentum=momentum, **matrices(mesh)
    )
