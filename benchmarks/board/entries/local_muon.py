"""The library's recommended method, with its defaults."""

from rows import matrices
from simulate import schedule

import curvadion_jax as cd


def optimizer(steps, mesh):
    return cd.local_muon(schedule(0.04, steps), budget=0.01, **matrices(mesh))
