"""What a compiled program reads from memory and writes to it, in a local step.

Operands and results of every kernel of the optimized program; of an operand that a
kernel only slices, what the slices take. Arrays that a TPU keeps in its fast memory
(VMEM, memory space 1 and semaphores) do not count. A loop counts as often as the
program says that it runs, and not at all if it does not say, as those of syncs. Of a
conditional the branch of a false predicate counts.
"""

import collections
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

# The reader of HLO text that the tests use.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import hlo

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_NO_KERNEL = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota", "add-dependency"),
)
_SLICES = ("slice", "dynamic-slice", "gather")
# What needs its whole operands for any element of the result.
_NEEDS_ALL = (
    *("reduce", "concatenate", "dot", "convolution", "sort", "scatter", "pad"),
    *("reduce-window", "custom-call", "fusion", "map", "broadcast"),
)


class Traffic(NamedTuple):
    """Bytes read and written, and how many kernels run."""

    read: float
    written: float
    kernels: int


def traffic(text: str) -> Traffic:
    """Of the program that `compiled.as_text()` prints."""
    program = hlo.parse(text)
    counts = re.findall(
        r'%?([\w.\-]+) = .*? while\(.*?known_trip_count":\{"n":"(\d+)"', text
    )
    passes = {name: int(count) for name, count in counts}
    read = written = 0.0
    kernels = 0
    waiting = [(program.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        computation = program.computations[name]
        names = {each.name: each for each in computation}
        for each in computation:
            if each.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", each.attributes)[1]
                if often := _passes(program, each, passes):
                    waiting.append((body, times * often))
            elif each.opcode == "conditional":
                by_bool = "true_computation" in each.attributes
                waiting.append((each.called[1 if by_bool else 0], times))
            elif each.opcode == "call":
                waiting.append((each.called[0], times))
            elif each.opcode not in _NO_KERNEL and not each.opcode.endswith("-done"):
                given, made = _moved(program, each, names)
                read, written = read + times * given, written + times * made
                kernels += times
    return Traffic(read, written, kernels)


def _passes(program: hlo.Program, loop: hlo.Instruction, known: dict[str, int]) -> int:
    """How often a loop runs: by the compiler's note, else by a constant limit."""
    if loop.name in known:
        return known[loop.name]
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)[1]
    limits = [
        int(re.match(r"(\d+)", each.attributes)[1])
        for each in program.computations[condition]
        if each.opcode == "constant" and "s32" in each.shape
    ]
    return limits[0] if limits else 0


def _bytes(shape: str) -> int:
    """Of all arrays of a shape that lie in the large memory."""
    total = 0
    for kind, width, lengths, layout in _ARRAY.findall(shape):
        if re.search(r"S\([125]\)", layout or ""):
            continue
        size = math.prod(int(x) for x in lengths.split(",") if x)
        total += size * (8 if kind == "pred" else int(width)) // 8
    return total


def _elements(shape: str) -> int:
    found = _ARRAY.search(shape)
    return math.prod(int(x) for x in found[3].split(",") if x) if found else 1


def _moved(
    program: hlo.Program, each: hlo.Instruction, names: dict[str, hlo.Instruction]
) -> tuple[float, float]:
    """Bytes that a kernel reads, and that it writes."""
    operands = [names[x] for x in each.operands if x in names]
    if each.opcode == "fusion":
        shares = _shares_read(program, each)
        pairs = zip(each.operands, shares, strict=True)
        read = sum(_bytes(names[x].shape) * share for x, share in pairs if x in names)
        return read, _written(program, each)
    if each.opcode in _SLICES:
        return _bytes(each.shape), _bytes(each.shape)
    if each.opcode == "slice-start":
        return max(0, _bytes(each.shape) - _bytes(operands[0].shape)), 0
    if each.opcode == "dynamic-update-slice":
        return (_bytes(operands[1].shape),) * 2
    if each.opcode == "copy-start":
        return _bytes(operands[0].shape), _bytes(_ARRAY.search(each.shape)[0])
    return sum(_bytes(x.shape) for x in operands), _bytes(each.shape)


def _written(program: hlo.Program, fusion: hlo.Instruction) -> int:
    """A fusion that updates a slice of an operand writes the slice alone."""
    inside = program.computations[fusion.called[0]]
    names = {each.name: each for each in inside}
    root = inside[-1]
    results = [names[x] for x in root.operands] if root.opcode == "tuple" else [root]
    total, updates = 0, False
    for result in results:
        while result.opcode == "bitcast":
            result = names[result.operands[0]]
        if result.opcode == "dynamic-update-slice":
            updates, result = True, names[result.operands[1]]
        total += _bytes(result.shape)
    return total if updates else _bytes(fusion.shape)


def _shares_read(program: hlo.Program, fusion: hlo.Instruction) -> list[float]:
    """The share of each operand that a fusion needs for its results."""
    inside = program.computations[fusion.called[0]]
    names = {each.name: each for each in inside}
    needed: collections.Counter[str] = collections.Counter()
    root = inside[-1]
    for name in root.operands if root.opcode == "tuple" else [root.name]:
        needed[name] = _elements(names[name].shape)
    for each in reversed(inside):
        size = _elements(each.shape)
        if each.opcode == "tuple" or not (wanted := min(needed[each.name], size)):
            continue
        for index, name in enumerate(each.operands):
            if name not in names:
                continue
            whole = _elements(names[name].shape)
            if each.opcode in _SLICES:
                more = wanted if index == 0 else 1
            elif each.opcode == "dynamic-update-slice":
                more = 0 if index == 0 else whole
            elif each.opcode in _NEEDS_ALL:
                more = whole
            else:
                more = wanted * whole / max(size, 1)
            needed[name] = min(whole, needed[name] + more)
    shares = dict.fromkeys(range(len(fusion.operands)), 1.0)
    for each in inside:
        if each.opcode == "parameter":
            index = int(re.match(r"(\d+)", each.attributes)[1])
            shares[index] = needed[each.name] / max(_elements(each.shape), 1)
    return [min(1.0, shares[index]) for index in range(len(fusion.operands))]
