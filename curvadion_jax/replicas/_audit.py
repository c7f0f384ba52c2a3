"""Says what a training step sends between replicas, from its compiled program."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._rows import AXIS, Replicas
from curvadion_jax.step._step import SYNC, VOTE


class Message(NamedTuple):
    """One collective that joins devices of different replicas.

    Attributes:
      kind: such as "all-reduce"; between slices of TPUs as their runtime calls it.
      arrays: dtypes and shapes of its result, such as "8 x u8[1,72]".
      bytes: size of its result; of a message in a loop, once.
      origin: the operation that it was made for, as JAX names it.
    """

    kind: str
    arrays: str
    bytes: int
    origin: str


class Audit(NamedTuple):
    """The messages that a step sends between replicas, printed as a table.

    Attributes:
      every_step: messages that no trigger decides on. A condition of your own, such as
        that of `optax.apply_if_finite`, may skip some of them.
      vote: messages that only a step with a vote sends, where replicas do not vote on
        every step (`triggers.at_intervals`).
      sync: messages inside the optimizer's condition, which a sync step takes.
    """

    every_step: list[Message]
    vote: list[Message]
    sync: list[Message]

    def __str__(self) -> str:
        lines = []
        for title, messages in zip(("every step", "vote", "sync"), self, strict=True):
            if not messages and title != "vote":
                lines.append(f"{title:10}  nothing")
            for message in messages:
                kind, arrays, size, origin = message
                lines.append(
                    f"{title:10}  {kind:14}  {size:>11,} B  {arrays}  {origin}"
                )
        return "\n".join(lines)


class _WithoutDevices(Audit):
    """What nothing is sent between: one replica, or simulated ones."""

    kind = ""

    def __str__(self) -> str:
        return f"{self.kind}: nothing is sent"


def audit(
    step: Callable[..., Any] | jax.stages.Compiled, mesh: Replicas, *arguments: Any
) -> Audit:
    """Compiles a training step and lists its messages between replicas.

    Call it once, before training. With a trigger that goes by the step number, a step
    sends nothing outside of syncs. With RMMC it sends an ``s32[]``, the vote, which has
    its own row if replicas do not vote on every step. If "every step" lists anything
    else, a part of the step uses all replicas at once: a transformation
    around the optimizer that is not elementwise (`optax.clip_by_global_norm`: pass it
    as ``before=``), or a mean of metrics (return rows, and average on the host).

    Args:
      step: the training step, jitted (also by `nnx.jit` or `eqx.filter_jit`) or
        not; or the compiled one,
        such as ``step.lower(*arguments).compile()``, which is not compiled again. What
        it computes and does not return is no part of its program.
      mesh: mesh of the replicas, from :func:`make_mesh`. Of :func:`simulated` and None
        nothing is compiled, since nothing is sent.
      *arguments: what it is called with; none with a compiled step. They are not
        changed, nor is it run.

    Returns:
      An :class:`Audit`; print it.

    Raises:
      TypeError: if `mesh` is no mesh.
      ValueError: if the backend gives no text of a compiled program.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import replicas
      >>> mesh = replicas.make_mesh()
      >>> rows = replicas.replicate(jnp.ones(4), mesh)
      >>> print(audit(replicas.map(jnp.sin, mesh), mesh, rows))
      every step  nothing
      sync        nothing
    """
    _rows.check_mesh(mesh)
    if not isinstance(mesh, Mesh):
        found = _WithoutDevices([], [], [])
        found.kind = "one replica" if mesh is None else "simulated"
        return found
    of_jax: Callable[..., Any] = lambda step: getattr(step, "compiled", step)
    compiled = of_jax(step)  # without Equinox's wrapper
    if not hasattr(compiled, "as_text"):
        lowered = _lowered(step, arguments, {}) or jax.jit(step).lower(*arguments)
        compiled = of_jax(lowered.compile())
    axis = list(mesh.shape).index(AXIS)
    replica = np.indices(mesh.devices.shape)[axis].ravel()  # of every device
    slices = [getattr(device, "slice_index", 0) for device in mesh.devices.flat]
    text = compiled.as_text()
    if not text:
        raise ValueError(
            "The backend gives no text of its program, so what it sends is not known. "
            "Audit the step on CPU devices."
        )
    return read_program(text, replica, slices)


def _lowered(step: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What the step's own `lower` gives; None if it is not jitted.

    Under another jit, what `nnx.jit` changes in place would be dropped as unused, and
    static arguments would not be. A jitted method's `lower` is that of its function,
    without `self`; a partial's arguments would be constants, with which a sync may be
    known not to happen.
    """
    if inspect.ismethod(step):
        return _lowered(step.__func__, (step.__self__, *arguments), named)
    if hasattr(step, "func") and hasattr(step, "keywords"):  # Equinox's partials, too
        bound = (*step.args, *arguments)
        return _lowered(step.func, bound, {**step.keywords, **named})
    return step.lower(*arguments, **named) if hasattr(step, "lower") else None


# The text of compiled programs is read here and in tests, and nowhere else.

# %name (arguments) -> result {
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
# %name = f32[8,16]{1,0} all-reduce(...), ..., metadata={op_name="..."}
_COLLECTIVE = re.compile(
    r"= (.*?) ((?:ragged-)?all-(?:reduce|gather|to-all)|reduce-scatter|"
    r"collective-(?:permute|broadcast))(-start)?\("
)
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}"
    r"|true_computation=(%?[\w.\-]+), false_computation=(%?[\w.\-]+)"
)
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COMPUTATION = re.compile(r"[\w.\-]+")
# Slices of TPUs talk by a runtime: (f32[8], u32[], token[]) recv(...), ..., with a
# target of slices and devices: {{100000,200000},{100001,200001}}, or "{1,2}x{0:1}"
_BETWEEN_SLICES = re.compile(
    r"= \((.*), u32\[\]\S*, token\[\]\) recv\(.*_rendezvous=\"([^\"]*)\""
    r'.*_megascale_target=(.*),_xla_megascale_transfer_type="(\w*)"'
)
_NAME = re.compile(r'op_name="([^"]*)"')
_WRAPPERS = re.compile(
    r"(?:jit\([^)]*\)|shard_map|while|body|cond|branch_\d+_fun|closed_call"
    rf"|{SYNC}|{VOTE})/"
)
_ARRAY = re.compile(r"(pred|bf16|c64|c128|[fsu]\d+\w*)\[([\d,]*)\]")
# replica_groups={{0,1},{2,3}}; of a permutation its pairs of a sender and a receiver
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}")
# An arange, transposed: replica_groups=[2,4]<=[2,2,2]T(1,0,2)
_ARANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Axes of a mesh: replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}
_MESH = re.compile(
    r"replica_groups=mesh\[([^]]+)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]+)\}"
)


def read_program(text: str, replica: np.ndarray, slices: Sequence[int] = ()) -> Audit:
    """Finds the messages between replicas.

    `replica` and `slices`, of TPUs, are those of every device.
    """
    messages = defaultdict(list)  # by the computation that they are in
    called = defaultdict(set)
    inside = {VOTE: set(), SYNC: set()}  # what these conditions call if they hold
    computation = entry = ""
    in_slice = defaultdict(list)  # the replicas in it
    for number, of_device in zip(slices, replica.tolist(), strict=False):
        in_slice[number].append(of_device)
    for line in text.splitlines():
        if not line.startswith(" ") and (start := _HEAD.match(line)):
            computation = start[2]
            entry = computation if start[1] else entry
            continue
        for listed, if_true, if_false in _BRANCHES.findall(line):
            names = _COMPUTATION.findall(listed or f"{if_false}, {if_true}")
            called[computation].update(names)
            name = _NAME.search(line)
            for condition in inside:
                # Not a condition within a branch, of which either may be.
                if name and re.search(rf"{condition}(?!.*branch_)", name[1]):
                    inside[condition].add(names[-1])  # the other is a local step
        for names in _CALLED.findall(line):
            called[computation].update(_COMPUTATION.findall(names))
        message = _message(line, replica) or _message_between(line, in_slice)
        if message:
            messages[computation].append(message)

    def reached(start: set[str], stop: set[str]) -> set[str]:
        found, waiting = set(), [*start]
        while waiting:
            name = waiting.pop()
            if name not in found and name not in stop:
                found.add(name)
                waiting.extend(called[name])
        return found

    # What nobody is seen to call may run on every step.
    unknown = {*called, *messages} - reached({entry}, set())
    always = reached({entry, *unknown}, inside[VOTE] | inside[SYNC])

    def of(names):
        return [each for name in messages if name in names for each in messages[name]]

    vote, sync = (reached(names, set()) - always for names in inside.values())
    return Audit(of(always), of(vote), of(sync))


def _message(line: str, replica: np.ndarray) -> Message | None:
    operation = _COLLECTIVE.search(line)
    if not operation:
        return None
    groups = groups_of(line) or [[*range(len(replica))]]
    if all(len({*replica[group].tolist()}) == 1 for group in groups):
        return None
    result, kind, in_background = operation.groups()
    if in_background and kind != "all-reduce":
        _, result, *_ = _elements(result)  # behind its operands, before contexts
    name = _NAME.search(line)
    # Without what every name begins with: jit(train_step)/while/body/cond/...
    return _described(kind, result, _WRAPPERS.sub("", name[1]) if name else "")


def _message_between(
    line: str, in_slice: Mapping[int, Sequence[int]]
) -> Message | None:
    """What slices send to each other; `in_slice` has the replicas of their devices."""
    found = _BETWEEN_SLICES.search(line)
    if not found:
        return None
    result, origin, target, kind = found.groups()
    groups = [  # of slices, which are counted from 1
        [(int(x) // 100_000 or int(x)) - 1 for x in re.findall(r"\d+", group)]
        for group in re.findall(r"\{([^{}]*)\}", target.partition("x")[0])
    ]
    # Without a group the notation is unknown, and so is a slice without devices. Where
    # slices hold several replicas each, devices talk to those of the same place.
    joined = [{tuple(in_slice.get(x, ())) for x in group} for group in groups]
    if joined and all(len(each) == 1 and () not in each for each in joined):
        return None
    return _described(kind.lower().replace("_", "-"), result, origin)


def _described(kind: str, result: str, origin: str) -> Message:
    arrays = _ARRAY.findall(result)
    size = sum(_bytes_of(dtype, shape) for dtype, shape in arrays)
    counts = Counter(f"{dtype}[{shape}]" for dtype, shape in arrays)
    shown = [f"{n} x {array}" if n > 1 else array for array, n in counts.items()]
    return Message(kind, ", ".join(shown), size, origin)


def _elements(of_tuple: str) -> list[str]:
    """The types of a tuple's elements, such as of "((f32[4]{0}, u8[]), f32[8])"."""
    found, depth = [""], 0
    for letter in of_tuple[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _bytes_of(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(_numbers(shape)) * bits // 8


def groups_of(attributes: str) -> list[list[int]]:
    """The groups of devices that a collective joins; none in an unknown notation."""
    if listed := _LISTED.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{(.*?)\}", listed[1])]
    if found := _MESH.search(attributes):
        axes, sizes, order, joined = found.groups()
        names, inside = (re.findall(r"'(\w+)'", each) for each in (axes, joined))
        shape = [int(size) for size in re.findall(r"=(\d+)", axes)]
        devices = _arange(sizes or ",".join(map(str, shape)), order).reshape(shape)
        last = [names.index(name) for name in inside]
        first = [axis for axis in range(len(names)) if axis not in last]
        devices = devices.transpose(first + last)
        return devices.reshape(-1, math.prod(shape[i] for i in last)).tolist()
    if found := _ARANGE.search(attributes):
        shape, sizes, order = found.groups()
        return _arange(sizes, order).reshape(_numbers(shape)).tolist()
    return []


def _numbers(text: str | None) -> list[int]:
    return [int(x) for x in (text or "").split(",") if x]


def _arange(sizes: str, order: str | None) -> np.ndarray:
    shape = _numbers(sizes)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_numbers(order) or range(len(shape)))
