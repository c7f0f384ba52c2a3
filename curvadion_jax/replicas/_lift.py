"""Makes transformations of one replica ones of rows."""

from __future__ import annotations

from collections.abc import Sequence

import optax

from curvadion_jax import _trees
from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._group import Group
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.replicas._map import over_model
from curvadion_jax.step._sync_state import AdaptiveSyncState


def lift(
    transformation: optax.GradientTransformation,
    mesh: Replicas,
    *,
    rows: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Makes an Optax transformation of one replica one of rows.

    A transformation that is not elementwise, such as `optax.clip_by_global_norm`, would
    otherwise get all replicas at once: it would clip by the norm over all of them, and
    send a number between them on every step. This library's optimizers are of rows
    already, and take such a transformation as ``before=``. Keys of
    `jax.random.key` in its state, as of `optax.add_noise`, become each replica's own.

    Args:
      transformation: any Optax transformation of one replica.
      mesh: from :func:`make_mesh` or :func:`simulated`.
      rows: names of extra arguments of `update` that are rows, such as ``["value"]``;
        all others are common.

    Returns:
      A transformation whose gradients, parameters and state are rows.

    Raises:
      TypeError: if `mesh` is no mesh.
      ValueError: if the parameters at `init`, or the gradients or extra arguments of
        `rows` at `update`, have no row for each replica; at `init`, if it is an
        optimizer of this library.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> clip = lift(optax.clip_by_global_norm(1.0), replicas.simulated(2))
      >>> gradients = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> updates, _ = clip.update(gradients, clip.init(gradients))
      >>> print(updates)
      [[0.6 0.8]
       [0.3 0.4]]
    """
    _rows.check_mesh(mesh)
    of_one = optax.with_extra_args_support(transformation)

    # Not by `map`, which refuses traced values from outside: hyperparameters may be.
    def init(params):
        _rows.check_rows(params, mesh, "Parameter")
        group = Group(_rows.axis_name(mesh))
        own = lambda params, _: (group.own_keys(of_one.init(params)), ())
        run = over_model(own, mesh)
        state = run(params, ())[0]
        if _trees.nodes_of(AdaptiveSyncState, state):
            raise ValueError(
                "lift makes a transformation one of rows, and the optimizers of this "
                "library are of rows already: lifted, each replica would train alone. "
                "Pass mesh= to the optimizer, and do not lift it."
            )
        return state

    def update_one(row, common):
        updates, state, params, own = row
        return of_one.update(updates, state, params, **own, **common), ()

    def update(updates, state, params=None, **extra_args):
        own = {name: extra_args.pop(name) for name in rows if name in extra_args}
        _rows.check_rows((updates, own), mesh, "Argument ")
        _rows.check_common(extra_args, mesh)
        row = updates, state, params, own
        return over_model(update_one, mesh)(row, extra_args)[0]

    return optax.GradientTransformationExtraArgs(init, update)
