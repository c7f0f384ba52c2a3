"""The only file that talks across replicas.

Everything here takes `axis_name: str | None`; None is one replica, for which every
reduction is the identity. Besides the reductions it holds what keeps a program from
hanging or from communicating unnoticed: the guarded conditional, the check that
gradients are still each replica's own, and the check that a quiet step is quiet.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from curvadion_jax import _matrices, _sharding
from curvadion_jax._group import Group, single

# What may name an axis without sending anything over it; all else counts as
# communication, so that a collective new to JAX is not overlooked.
_SILENT = ("axis_index", "pvary")


def check_axis_name(axis_name: Any) -> None:
    """Refuses what is not one name: a tuple of them would blind the guards."""
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a string or None, got {axis_name!r}")


def axis_size(axis_name: str | None) -> int:
    """Number of replicas.

    Raises:
      ValueError: if no such axis is bound where this is called.
    """
    if axis_name is None:
        return 1
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        bound = list(jax.sharding.get_abstract_mesh().manual_axes)
        here = f" (bound here: {', '.join(map(repr, bound))})" if bound else ""
        raise ValueError(
            f"the axis {axis_name!r} is not bound here{here}: call `update` inside "
            f"curvadion_jax.replicas.step (or a shard_map or vmap with the axis "
            f"{axis_name!r}), or pass axis_name=None for one replica"
        ) from error


def _varying(x: Any) -> frozenset[str]:
    return _varying_aval(jax.typeof(x))


def _varying_aval(aval: Any) -> frozenset[str]:
    return aval.manual_axis_type.varying


def is_checked(axis_name: str | None) -> bool:
    """Whether JAX tracks here what differs over the axis (shard_map, check_vma on)."""
    if axis_name is None or not is_manual(axis_name):
        return False
    return axis_name in _varying(lax.axis_index(axis_name))


def is_manual(axis_name: str | None) -> bool:
    """Whether the axis is one of an enclosing shard_map (and not of a vmap)."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def checked_axes() -> list[str]:
    """Axes of enclosing shard_maps over which JAX tracks what differs."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return [axis for axis in manual if is_checked(axis)]


def varying_manual_axes(x: Any) -> frozenset[str]:
    """Axes of enclosing shard_maps, of more than one device, over which x differs."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return frozenset(axis for axis in _varying(x) if sizes.get(axis, 1) > 1)


def is_varying(x: Any, axis_name: str) -> bool:
    """Whether x may differ over the axis, as far as JAX tracks it."""
    return axis_name in _varying(x)


def vary(tree: Any, axis_name: str | None) -> Any:
    """Marks every array as one that may differ over the axis; no communication."""
    if axis_name is None or not is_checked(axis_name):
        return tree

    def cast(x):
        if axis_name in _varying(x):
            return x
        return lax.pcast(x, (axis_name,), to="varying")

    return jax.tree.map(cast, tree)


def mean(tree: Any, axis_name: str | None) -> Any:
    """Mean over replicas of every array, in at least float32, cast back."""
    if axis_name is None:
        return tree
    tree = vary(tree, axis_name)  # psum takes varying operands only
    wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x, jnp.float32)), tree)
    reduced = lax.pmean(wide, axis_name)
    return jax.tree.map(lambda r, x: r.astype(x.dtype), reduced, tree)


def group(axis_name: str | None) -> Group:
    """What a synchronizer may do over the axis.

    Results are marked as varying, for code whose conditions mix them with local state.
    """
    if axis_name is None:
        return single()

    def over(collective):
        def apply(tree):
            tree = vary(tree, axis_name)
            return vary(jax.tree.map(collective, tree), axis_name)

        return apply

    return Group(
        size=axis_size(axis_name),
        replica=lax.axis_index(axis_name),
        mean=lambda tree: vary(mean(tree, axis_name), axis_name),
        all_to_all=over(lambda x: lax.all_to_all(x, axis_name, 0, 0)),
        all_gather=over(lambda x: lax.all_gather(x, axis_name)),
        by_device=functools.partial(_by_device, axis_name),
    )


def _by_device(
    axis_name: str, function: Callable[[Group, list], list], tree: Any
) -> list:
    """See `Group.by_device`."""
    leaves, axes = jax.tree.leaves(tree), _matrices.inner_axes()
    if not axes:
        return function(group(axis_name), leaves)
    specs = _sharding.specs(tree, axes)
    together = defaultdict(list)
    for index, spec in enumerate(specs):
        together[_sharding.named_axes(spec)].append(index)
    results: list[Any] = [None] * len(leaves)
    for members in together.values():
        divided = [specs[index] for index in members]
        mapped = jax.shard_map(
            lambda parts: function(group(axis_name), parts),
            in_specs=(divided,),
            out_specs=[(spec, spec) for spec in divided],
            axis_names=set(axes),
        )
        found = mapped([leaves[index] for index in members])
        for index, pair in zip(members, found, strict=True):
            results[index] = pair
    return results


def largest(
    number: jax.Array, axis_name: str | None, asked: jax.Array | None = None
) -> jax.Array:
    """The largest of the replicas' numbers, int32[]: one int32 scalar all-reduce.

    Integers, because a float maximum drops NaN in shard_map on CPU.

    Args:
      number: that of one replica.
      axis_name: replica axis.
      asked: bool[], the same on all replicas; where it is false nothing is reduced, and
        the answer is 0. None always asks.

    Raises:
      ValueError: if `asked` may differ between replicas.
    """
    if axis_name is not None and asked is not None and is_varying(asked, axis_name):
        raise ValueError(
            f"the step differs between the replicas of axis {axis_name!r}; some would "
            "wait for ever for the others. A counter in the state cannot be seen to be "
            "the same on all of them: give them the number of the step from outside, "
            "as a further argument of the function that replicas.step returns, "
            "train(state, batch, step)"
        )

    def reduce(number):
        if axis_name is None:
            return number
        return lax.pmax(vary(number, axis_name), axis_name)

    if asked is None:
        return reduce(number)
    return lax.cond(asked, reduce, lambda _: jnp.zeros([], jnp.int32), number)


def switch(
    which: jax.Array,
    quiet: Callable[..., Any],
    syncs: Sequence[Callable[..., Any]],
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """`lax.switch` around collectives, that cannot hang and keeps quiet steps quiet.

    Args:
      which: int32[], the same on all replicas: 0 is quiet, v the v-th of the syncs.
      quiet: branch that may not communicate over the axis.
      syncs: branches that may.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.

    Returns:
      What the chosen branch returns, marked as varying over the axis.

    Raises:
      ValueError: if the choice may differ between replicas (the program would wait
        for ever), if the quiet branch holds a collective over the axis, or if the
        branches return different shapes or dtypes.
    """
    _require_shared(which, axis_name)
    silent = _trace(quiet, *operands)
    _refuse_collectives(silent, axis_name)
    loud = _trace_syncs(syncs, silent.result, *operands, axis_name=axis_name)
    return _branch(which, [silent, *loud], *operands, axis_name=axis_name)


def then_sync(
    which: jax.Array,
    syncs: Sequence[Callable[..., Any]],
    done: Any,
    *operands: Any,
    axis_name: str | None,
) -> Any:
    """What a quiet step has done, or what a sync makes of it; cannot hang.

    A loop of one pass or none. XLA copies much of what a conditional hands through
    (https://github.com/jax-ml/jax/issues/39449); what goes through a loop that does not
    run stays where it is. The conditional inside keeps XLA from computing in front of
    the loop what a sync needs and no pass changes.

    Args:
      which: int32[], the same on all replicas: 0 is quiet, v the v-th of the syncs.
      syncs: functions of `done` and the operands that may communicate over the axis.
      done: tree of arrays.
      *operands: trees of arrays, passed on.
      axis_name: replica axis.

    Returns:
      A tree like `done`, marked as varying over the axis.

    Raises:
      ValueError: as :func:`switch`.
    """
    _require_shared(which, axis_name)
    done = vary(done, axis_name)
    silent = _trace(lambda done, *_: done, done, *operands)
    loud = _trace_syncs(syncs, silent.result, done, *operands, axis_name=axis_name)

    def once(_, done):
        branches = [silent, *loud]
        return _branch(which, branches, done, *operands, axis_name=axis_name)

    passes = jnp.minimum(which, 1)
    return lax.fori_loop(0, passes, once, done)


def _require_shared(which: jax.Array, axis_name: str | None) -> None:
    if axis_name is not None and axis_name in _varying(which):
        raise ValueError(
            f"the decision to synchronise differs between the replicas of axis "
            f"{axis_name!r}; some would wait for ever for the others: reduce it over "
            "the axis first"
        )


def _trace_syncs(
    syncs: Sequence[Callable[..., Any]], quiet: Any, *operands: Any, axis_name
) -> list["_Traced"]:
    """The syncs as programs that cannot hang and return what a quiet step does."""
    branches = []
    for sync in syncs:
        loud = _trace(sync, *operands)
        if axis_name is not None and _hangs(loud.program.jaxpr, axis_name):
            raise ValueError(
                "a synchronised step communicates inside a condition that differs "
                f"between the replicas of axis {axis_name!r}; some would wait for ever "
                "for the others. Wrappers that decide by a replica's own values, such "
                "as optax.apply_if_finite, do not go around an optimizer whose factors "
                "are averaged: use another synchronizer, or leave the wrapper out"
            )
        _require_same_result(loud.result, quiet)
        branches.append(loud)
    return branches


def _branch(
    which: jax.Array, branches: Sequence["_Traced"], *operands: Any, axis_name
) -> Any:
    def marked(traced):
        return lambda *args: vary(traced(*args), axis_name)

    functions = [marked(traced) for traced in branches]
    if len(functions) == 2:
        return lax.cond(which > 0, *reversed(functions), *operands)
    return lax.switch(which, functions, *operands)


class _Traced(NamedTuple):
    """A function as a program: looked at once, and run without tracing it again."""

    program: ClosedJaxpr
    result: Any

    def __call__(self, *operands: Any) -> Any:
        leaves = jaxpr_as_fun(self.program)(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(self.result), leaves)


def _trace(function: Callable[..., Any], *operands: Any) -> _Traced:
    return _Traced(*jax.make_jaxpr(function, return_shape=True)(*operands))


def _require_same_result(synced: Any, still: Any) -> None:
    if jax.tree.structure(synced) != jax.tree.structure(still):
        raise ValueError(
            "a synchronised and a quiet step return different trees:\n"
            f"{jax.tree.structure(synced)}\n{jax.tree.structure(still)}"
        )
    pairs = zip(jax.tree.leaves_with_path(synced), jax.tree.leaves(still), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"a synchronised step returns {a.dtype}{list(a.shape)} and a quiet "
                f"step {b.dtype}{list(b.shape)} at {jax.tree_util.keystr(path)}: an "
                "optimizer must keep the shapes and dtypes of its state and updates"
            )


def _inner_programs(equation: JaxprEqn) -> list[Jaxpr]:
    values = jax.tree.leaves(list(equation.params.values()))
    values = [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values]
    return [value for value in values if isinstance(value, Jaxpr)]


def _hangs(jaxpr: Jaxpr, axis_name: str) -> bool:
    """Whether a collective stands in a branch that replicas may not take together."""
    for equation in jaxpr.eqns:
        inner = _inner_programs(equation)
        decided_by = []
        if equation.primitive.name == "cond":
            decided_by = [equation.invars[0].aval]
        elif equation.primitive.name == "while":
            decided_by = equation.params["cond_jaxpr"].out_avals
        local = any(axis_name in _varying_aval(aval) for aval in decided_by)
        if local and any(_collectives(program, axis_name) for program in inner):
            return True
        if any(_hangs(program, axis_name) for program in inner):
            return True
    return False


def _named_axes(equation: JaxprEqn) -> set[Any]:
    named = set()
    for key in ("axes", "axis_name"):
        axes = equation.params.get(key, ())
        named.update(axes if isinstance(axes, tuple | list) else (axes,))
    return named


def _collectives(jaxpr: Jaxpr, axis_name: str) -> list[str]:
    """Names of the collectives over the axis in a program, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in _SILENT and axis_name in _named_axes(equation):
            found.append(name)
        for program in _inner_programs(equation):
            found.extend(_collectives(program, axis_name))
    return found


def _refuse_collectives(traced: _Traced, axis_name: str | None) -> None:
    found = [] if axis_name is None else _collectives(traced.program.jaxpr, axis_name)
    if found:
        raise ValueError(
            f"a quiet step would communicate over the axis {axis_name!r} ({found[0]}): "
            "the inner optimizer, the local step and the trigger must not reduce over "
            "the replica axis themselves; leave that to the synchronizer, and pass "
            "the inner optimizer axis_name=None"
        )


def run_locally(
    function: Callable[..., Any], *operands: Any, axis_name: str | None
) -> Any:
    """Result of a computation that must stay on its replica.

    Raises:
      ValueError: if it would communicate over the axis.
    """
    if axis_name is None:
        return function(*operands)
    traced = _trace(function, *operands)
    _refuse_collectives(traced, axis_name)
    return traced(*operands)


def require_local(
    gradients: Any, axis_name: str | None, *, allow_unchecked: bool = False
) -> None:
    """Refuses gradients that were averaged over the replicas before they came here.

    Raises:
      ValueError: if a gradient is the same on all replicas by its type, so that it was
        reduced already; if nothing is tracked because of check_vma=False and that was
        not allowed; or, for axis_name=None, if gradients differ between the devices
        of an enclosing shard_map.
    """
    leaves = jax.tree.leaves_with_path(gradients)
    if axis_name is None:
        for path, leaf in leaves:
            if axes := varying_manual_axes(leaf):
                raise ValueError(
                    f"axis_name is None, but the gradient "
                    f"{jax.tree_util.keystr(path)} differs along the mesh axis "
                    f"{', '.join(sorted(axes))}: replicas would drift apart and never "
                    f"synchronise. Pass axis_name={min(axes)!r}"
                )
        return
    axis_size(axis_name)
    if not is_manual(axis_name):
        return
    if not is_checked(axis_name):
        if allow_unchecked:
            return
        raise ValueError(
            "shard_map was called with check_vma=False, so gradients that are "
            f"averaged over {axis_name!r} already cannot be told from local ones. "
            "Leave check_vma on, or use curvadion or adaptive_sync with "
            "allow_unchecked=True and make sure of it yourself"
        )
    for path, leaf in leaves:
        if axis_name not in _varying(leaf):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is the same on all "
                f"replicas of {axis_name!r}: it has been reduced over the axis before "
                "it got here, so every step communicates in full. Either the "
                "parameters are not replica-varying (in_specs P(): use "
                "curvadion_jax.replicas.replicate and replicas.step, which give them "
                "a leading replica axis), or the gradients go through a pmean or "
                "psum: remove it"
            )
