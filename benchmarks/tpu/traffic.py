"""What a compiled TPU program sends: between which chips, how much, and when.

Bytes are those that one chip sends in one execution of the step, by the rule of the
library's counters: an all-reduce of B bytes over n chips 2 (n - 1) / n B, an all-gather
of k each (n - 1) k, an all-to-all and a reduce-scatter (n - 1) / n of what goes in. Of
a collective that joins several replicas only what must pass between these is counted:
an all-reduce over c chips of each of N replicas is 2 (N - 1) / N B / c. Between slices
the compiler leaves transfers to a runtime ("megascale"), to which it hands arrays by
`send` and `recv`; what goes into `send` is counted by the same rule.

What stands in a conditional, or in a loop of which the compiled program does not say
how often it runs, happens at syncs only; everything else on every step.
"""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The reader of HLO text that the tests use.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import hlo

# The second half of a pair, and what repeats its first half's operands.
_SECOND = ("-done", "-update")


class Transfer(NamedTuple):
    """One collective.

    Attributes:
        kind: Such as "all-gather".
        across: Whether it joins chips of several replicas.
        at_sync: Whether it is executed at syncs only.
        times: How often a step executes it.
        size: Chips that talk to each other, of one replica; or replicas.
        sharers: Chips of each replica in it, if it joins replicas; 1 if not.
        given: Bytes that go in on one chip, once.
        whole: Bytes of the largest array that the chips have or get together, once.
    """

    kind: str
    across: bool
    at_sync: bool
    times: int
    size: int
    sharers: int
    given: int
    whole: int

    @property
    def sent(self) -> float:
        """Bytes that a chip sends in a step."""
        n = self.size
        factor = {
            "all-reduce": 2 * (n - 1) / n / self.sharers,
            "all-gather": n - 1,
            "reduce-scatter": (n - 1) / n / self.sharers,
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
            "collective-permute": 1,
        }[self.kind]
        return self.times * factor * self.given


def transfers(text: str, chips: int, slices: int) -> list[Transfer]:
    """All collectives of a program, each once.

    Args:
        text: The compiled program.
        chips: Of one replica. A program for several slices, each a replica, counts the
            chips of one slice only.
        slices: Number of slices.
    """
    program = hlo.parse(text)
    found: dict[tuple, Transfer] = {}
    for name, at_sync, times in _visits(program):
        sizes = {x.name: x for x in program.computations[name]}
        for each in program.computations[name]:
            silent = not each.communicates or each.opcode.endswith(_SECOND)
            if silent or each.opcode == "recv" or each.bytes == 0:
                continue
            operands = [sizes[x] for x in each.operands if x in sizes]
            given = [x.bytes for x in operands if x.shape != "token[]"]
            # One that was made asynchronous stands in several computations.
            channel = re.search(r"channel_id=(\d+)", each.attributes)
            chain = re.search(r'chain_id="(\d+)"', each.attributes)
            key = (channel and channel[1], chain[1], at_sync) if chain else None
            kind, across, size, sharers = _joined(each, chips, slices)
            whole = max(given, default=0)
            whole *= size * sharers if kind == "all-gather" else 1
            how = (kind, across, at_sync, times, size, sharers, sum(given), whole)
            found.setdefault(key or (name, each.name), Transfer(*how))
    return [*found.values()]


def _visits(program: hlo.Program) -> Iterator[tuple[str, bool, int]]:
    """Computations, whether they run at syncs only, and how often."""
    waiting, seen = [(program.entry, False, 1)], set()
    while waiting:
        name, at_sync, times = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name, at_sync, times
        for each in program.computations[name]:
            if each.opcode.endswith(_SECOND):
                continue
            inside, often = at_sync, times
            if each.opcode == "conditional":
                inside = True
            elif each.opcode == "while":
                count = passes(program, each)
                inside, often = at_sync or count is None, times * (count or 1)
            waiting.extend((called, inside, often) for called in each.called)


def _joined(
    each: hlo.Instruction, chips: int, slices: int
) -> tuple[str, bool, int, int]:
    """Kind, whether it joins replicas, how many or chips, and chips of each in it."""

    def replica(partition: int) -> int:
        # What stays in the program of a slice stays in the slice.
        return 0 if slices > 1 else partition // chips

    kind = re.sub("-start$", "", each.opcode)
    if kind == "send":
        (kind,) = re.findall(r'_transfer_type="([A-Z_]+)"', each.attributes)
        return kind.lower().replace("_", "-"), True, slices, 1
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", each.attributes.partition("pairs=")[2])
        across = any(len({replica(int(x)) for x in pair}) > 1 for pair in pairs)
        return kind, across, 2, 1
    group = each.groups[0]
    replicas = len({replica(x) for x in group})
    if replicas > 1:
        return kind, True, replicas, len(group) // replicas
    return kind, False, len(group), 1


def passes(program: hlo.Program, loop: hlo.Instruction) -> int | None:
    """How often a loop over a counter from 0 runs; None if it has no known limit.

    At most as often, where it may also end by another number, such as an error that is
    small enough. The counter need not go up by 1: loops that gather an operand of a
    product while they multiply are unrolled, and take two steps in a pass.
    """
    condition, names = _computation(program, loop, "condition")
    limits = {
        compare.name: _constant(names[operand])
        for compare in condition
        if compare.opcode == "compare"
        for operand in compare.operands
        if names[operand].opcode == "constant" and "s32" in names[operand].shape
    }
    if not limits:
        return None
    ((name, limit),) = limits.items()
    compare = names[name]
    counter = names[compare.operands[0]]
    (index,) = re.findall(r"index=(\d+)", counter.attributes)
    body, names = _computation(program, loop, "body")
    after = returned = body[-1]  # as XLA writes it, the root is the last
    if returned.opcode == "tuple":
        after = names[returned.operands[int(index)]]
    steps = [
        _constant(names[x])
        for x in after.operands
        if x in names and names[x].opcode == "constant"
    ]
    if after.opcode != "add" or len(steps) != 1 or "LT" not in compare.attributes:
        raise ValueError(f"{loop.name}: read off the text how often it runs.")
    return math.ceil(limit / steps[0])


def _computation(
    program: hlo.Program, loop: hlo.Instruction, part: str
) -> tuple[list[hlo.Instruction], dict[str, hlo.Instruction]]:
    (name,) = re.findall(rf"{part}=%?([\w.\-]+)", loop.attributes)
    instructions = program.computations[name]
    return instructions, {each.name: each for each in instructions}


def _constant(instruction: hlo.Instruction) -> int:
    return int(instruction.attributes.partition(")")[0])
