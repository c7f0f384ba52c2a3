"""Replicas as rows: arrays with a leading axis of replicas, and what is done with them.

A replica is a worker of DiLoCo, and a row its copy of the parameters.
`replicate` gives parameters a row for each replica, `map` runs a loss of one replica on
all rows, and the optimizer is given the rows. `consensus` is the model of all.
"""

from curvadion_jax.mesh._rows import AXIS
from curvadion_jax.replicas._audit import Audit, Message, audit
from curvadion_jax.replicas._consensus import anchor, consensus, divergence
from curvadion_jax.replicas._lift import lift
from curvadion_jax.replicas._map import map
from curvadion_jax.replicas._mesh import make_mesh, simulated
from curvadion_jax.replicas._offload import offload
from curvadion_jax.replicas._repair import repair
from curvadion_jax.replicas._replicate import place, replicate, split
from curvadion_jax.replicas._resize import resize

__all__ = [
    "AXIS",
    "Audit",
    "Message",
    "anchor",
    "audit",
    "consensus",
    "divergence",
    "lift",
    "make_mesh",
    "map",
    "offload",
    "place",
    "repair",
    "replicate",
    "resize",
    "simulated",
    "split",
]
