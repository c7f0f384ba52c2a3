"""The way through the code: files and functions of one step, and how deep it goes.

    python benchmarks/step/way.py [--deepest]

A step of two replicas is traced, its sync included, and every function of the package
that Python enters is noted. *Levels* are those that are entered and not yet left at the
deepest point, from `update`; what has no name, such as a lambda, is not counted, and
neither are the functions of other packages in between. `--deepest` names them.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import measuring
import optax

import curvadion_jax as cd


class Way(NamedTuple):
    """Names are ``file:function``, in the order in which they are first entered."""

    functions: list[str]
    deepest: list[str]

    @property
    def files(self) -> list[str]:
        return [*dict.fromkeys(name.partition(":")[0] for name in self.functions)]


def way(step: Callable[[], Any], package: Any) -> Way:
    """The functions of a package that a call enters."""
    root = Path(package.__file__).parent
    functions: dict[str, None] = {}
    stack: list[str] = []
    deepest: list[str] = []

    def note(frame, event, _):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_name.isidentifier():
            return
        if not Path(code.co_filename).is_relative_to(root):
            return
        if event == "return":
            stack.pop()
            return
        stack.append(f"{Path(code.co_filename).relative_to(root)}:{code.co_name}")
        functions.setdefault(stack[-1])
        if len(stack) > len(deepest):
            deepest[:] = stack

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Way([*functions], deepest)


def ways() -> dict[str, Way]:
    """By the name of the optimizer."""
    kernel = {"kernel": jnp.ones((64, 64))}
    params = {"in": kernel, "out": kernel, "norm": {"bias": jnp.ones(64)}}
    mesh = cd.replicas.make_mesh(2, devices=jax.devices()[:2])
    rows = cd.replicas.replicate(params, mesh)
    ours: dict[str, Any] = {"mesh": mesh, "dimension_numbers": measuring.matrices}
    cases: dict[str, tuple[Any, Any, Any]] = {
        "`optax.contrib.muon`": (measuring.muon(0.02), params, optax),
        "`local_muon`": (cd.local_muon(0.02, **ours), rows, cd),
        "`curvadion`": (cd.curvadion(0.02, threshold=0.3, **ours), rows, cd),
    }
    found = {}
    for name, (tx, tree, package) in cases.items():
        trace = jax.jit(tx.update).trace
        found[name] = way(functools.partial(trace, tree, tx.init(tree), tree), package)
    return found


def main() -> None:
    parser = measuring.parser(__doc__)
    parser.add_argument("--deepest", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    found = ways()
    measuring.table(
        ["a step of", "files", "functions", "levels"],
        (
            [name, *map(str, map(len, (x.files, x.functions, x.deepest)))]
            for name, x in found.items()
        ),
    )
    if options.deepest:
        for name, each in found.items():
            print(f"\n{name}", *each.deepest, sep="\n  ")


if __name__ == "__main__":
    main()
