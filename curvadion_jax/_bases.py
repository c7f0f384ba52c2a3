"""Orthonormal bases of the left factors of all parameters."""

from collections import defaultdict

import jax
import jax.numpy as jnp

from curvadion_jax import _collectives, _sharding
from curvadion_jax._matrices import MatrixView, make_view
from curvadion_jax._orthonormalize import OWN, Orthonormalize


def of_factors(
    names: list[str],
    views: list[MatrixView],
    orthonormalize: Orthonormalize,
    factors: list[jax.Array],
) -> list[jax.Array]:
    """Bases of left factors; inside a replica every device makes some of them.

    Left to itself the compiler has each device do all, where the axis divides the
    matrix along its other side: more work than the products of a divided matrix. What
    a function of the user's needs is not known: constraints by inner axes, say.

    Args:
      names: paths of the parameters.
      views: how each is seen as matrices.
      orthonormalize: see `_orthonormalize`.
      factors: [*batch, rows, r] of each.
    """
    if not _sharding.inner_axes() or orthonormalize not in OWN:
        return _by_shape(factors, orthonormalize)
    made_of = [(view.shape, view.p_axes) for view in views]
    with _sharding.noting_made_of(names, factors, made_of):
        bases = _collectives.by_matrix(
            lambda stacks: _by_shape([stack.array for stack in stacks], orthonormalize),
            dict(zip(names, factors, strict=True)),
            {
                name: make_view(factor.shape, -2, -1)
                for name, factor in zip(names, factors, strict=True)
            },
        )
    return [bases[name] for name in names]


def _by_shape(
    factors: list[jax.Array], orthonormalize: Orthonormalize
) -> list[jax.Array]:
    """Orthonormalises factors, those of equal shape as one stack.

    One factorisation in the program for each shape, and not for each parameter. Only
    the factors are stacked: the momenta would be copied and resharded by it.
    """
    groups = defaultdict(list)
    for index, factor in enumerate(factors):
        groups[factor.shape[-2:], factor.dtype].append(index)
    result = list(factors)
    for (shape, _), members in groups.items():
        if len(members) == 1:
            result[members[0]] = orthonormalize(factors[members[0]])
            continue
        stacks = [factors[index].reshape(-1, *shape) for index in members]
        basis, start = orthonormalize(jnp.concatenate(stacks)), 0
        for index, stack in zip(members, stacks, strict=True):
            part = basis[start : start + stack.shape[0]]
            result[index] = part.reshape(factors[index].shape)
            start += stack.shape[0]
    return result
