"""Sites: one training run over independent programs that come, go and crash.

A site is an ordinary JAX program with an optimizer of its own. Sites share an object
store; no program connects to another, and there is no coordinator. Every `every` steps
a site stores its compressed pseudo-gradient. Once enough have, one of them commits the
round, and all take the same outer step.

It needs `obstore`, which comes with the extra ``curvadion-jax[sites]``.
"""

from curvadion_jax.sites._site import Site, SiteMetrics

__all__ = ["Site", "SiteMetrics"]
