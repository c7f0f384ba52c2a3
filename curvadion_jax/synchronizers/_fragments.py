"""Parts of the parameters that come together in turn, a part at each sync.

A fragment is a set of whole parameters, by path, or None for all of them. A part of a
tree has `optax.MaskedNode` in place of what is not in it, as under `optax.masked`, so
that paths stay what they are.
"""

from collections.abc import Iterable
from typing import Any

import jax
import optax

from curvadion_jax import _paths

Fragment = frozenset[str] | None


def split(params: optax.Params, number: int) -> list[Fragment]:
    """The fragments, of about equal size.

    Parameters in the order of their sizes, largest first, go to the fragment that is
    smallest so far (the first of equal ones).

    Raises:
      ValueError: if there are fewer parameters, or several of one path.
    """
    if number == 1:
        return [None]
    sizes = [(name, x.size) for name, x in _paths.leaves_with_path(params)]
    if len(sizes) < number or len({name for name, _ in sizes}) < len(sizes):
        raise ValueError(
            f"{number} fragments need as many parameters, of different paths, got "
            f"{[name for name, _ in sizes]}: give fewer fragments. A stack of layers "
            "is one parameter"
        )
    fragments: list[set[str]] = [set() for _ in range(number)]
    filled = [0] * number
    for name, size in sorted(sizes, key=lambda pair: -pair[1]):
        smallest = min(range(number), key=lambda index: filled[index])
        fragments[smallest].add(name)
        filled[smallest] += size
    return [frozenset(names) for names in fragments]


def fragment_paths(params: optax.Params, fragments: int) -> list[list[str]]:
    """Which parameters come together at a sync of ``reconcile(fragments=...)``.

    Args:
      params: the parameters, or their shapes.
      fragments: number of fragments.

    Returns:
      A list of paths for each fragment, in the order in which they take turns.

    Raises:
      ValueError: if there are more fragments than parameters, or fewer than one.

    Example:
      >>> shapes = {"a": (2, 2), "b": (4, 4), "c": (3, 3), "d": (1,)}
      >>> params = {name: jax.numpy.ones(shape) for name, shape in shapes.items()}
      >>> fragment_paths(params, 2)
      [['b'], ['a', 'c', 'd']]
    """
    check_number("fragments", fragments)
    names = [name for name, _ in _paths.leaves_with_path(params)]
    return [
        [name for name in names if holds(fragment, name)]
        for fragment in split(params, fragments)
    ]


def check_number(what: str, number: Any) -> None:
    """Refuses what is no count from one on."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{what} must be an int, got {number!r}")
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number}")


def holds(fragment: Fragment, name: str) -> bool:
    """Whether the parameter of this path is in the fragment."""
    return fragment is None or name in fragment


def pick(tree: Any, fragment: Fragment) -> Any:
    """The fragment's part of a tree like the parameters."""
    if fragment is None:
        return tree
    return _paths.map_with_path(
        lambda name, x: x if name in fragment else optax.MaskedNode(), tree
    )


def put(tree: Any, part: Any, fragment: Fragment) -> Any:
    """The tree with another part: what `pick` took, replaced."""
    if fragment is None:
        return part
    new = iter(jax.tree.leaves(part))
    return _paths.map_with_path(
        lambda name, x: next(new) if name in fragment else x, tree
    )


def of_each(states: Iterable[Any]) -> Any:
    """States of the fragments as one: a list, or the state where there is one."""
    states = list(states)
    return states[0] if len(states) == 1 else states


def state_of(states: Any, index: int, fragment: Fragment) -> Any:
    """One fragment's state in what `of_each` made."""
    return states if fragment is None else states[index]


def with_state(states: Any, index: int, fragment: Fragment, new: Any) -> Any:
    """What `of_each` made, with another state of one fragment."""
    if fragment is None:
        return new
    return [new if each == index else old for each, old in enumerate(states)]
