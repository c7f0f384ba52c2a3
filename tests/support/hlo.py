"""Reads compiled HLO text as far as tests need: who calls whom, and what is sent."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from curvadion_jax.replicas._audit import groups_of

_HEAD = re.compile(r"(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "collective-", "ragged-all-to-all"),
    *("reduce-scatter", "send", "recv"),
)


class Instruction(NamedTuple):
    """One line: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    called: tuple[str, ...]
    attributes: str

    @property
    def communicates(self) -> bool:
        return self.opcode.startswith(_COLLECTIVES)

    @property
    def operands(self) -> list[str]:
        """Names of what it works on."""
        depth, end = 1, 0
        while depth and end < len(self.attributes):
            depth += {"(": 1, ")": -1}.get(self.attributes[end], 0)
            end += 1
        return re.findall(r"%([\w.\-]+)", self.attributes[:end])

    @property
    def arrays(self) -> list[tuple[int, tuple[int, ...]]]:
        """Bits of an element and shape, of the result or of each of a tuple's parts."""
        return [
            (
                8 if kind == "pred" else int(width),
                tuple(map(int, re.findall(r"\d+", x))),
            )
            for kind, width, x in _ARRAY.findall(self.shape)
        ]

    @property
    def bytes(self) -> int:
        """Of the result, a tuple's parts together."""
        return sum(math.prod(shape) * bits // 8 for bits, shape in self.arrays)

    def joins(self, devices: int) -> bool:
        """Whether it joins different ones of so many neighbouring devices."""
        return any(
            len({each // devices for each in group}) < len(set(group))
            for group in self.groups
        )

    @property
    def groups(self) -> list[list[int]]:
        """Devices that talk to each other; of a permutation pairs of two of them."""
        found = groups_of(self.attributes)
        if not found:
            raise ValueError(f"no replica groups in {self.attributes!r}")
        return found


class Program(NamedTuple):
    """Computations by name, and the entry's name."""

    computations: dict[str, list[Instruction]]
    entry: str

    def reachable(self, names: Iterable[str], branches: bool = True) -> list[str]:
        """These computations and all they call, branches of conditionals or not."""
        found: list[str] = []
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.append(name)
            for instruction in self.computations[name]:
                if branches or instruction.opcode != "conditional":
                    waiting.extend(instruction.called)
        return found

    def instructions(self, names: Iterable[str], branches: bool = True):
        """Of these computations and all they call."""
        reached = self.reachable(names, branches)
        return [each for name in reached for each in self.computations[name]]

    def collectives(self, names: Iterable[str], branches: bool = True):
        """What these computations and all they call communicate."""
        return [x for x in self.instructions(names, branches) if x.communicates]

    def conditionals(self) -> list[Instruction]:
        """The outermost conditionals that communicate in one of their branches."""
        return [
            each
            for each in self.instructions([self.entry], branches=False)
            if each.opcode == "conditional" and self.collectives(each.called)
        ]


def parse(text: str) -> Program:
    """The program that `compiled.as_text()` prints."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = computations.setdefault(head["name"], [])
            entry = head["name"] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            match = _INSTRUCTION.match(line)
            if match:
                current.append(_instruction(match["name"], match["rest"]))
    if entry is None:
        raise ValueError("no ENTRY computation in this text")
    for instructions in computations.values():
        for instruction in instructions:
            if missing := set(instruction.called) - set(computations):
                raise ValueError(f"{instruction.name} calls unknown {missing}")
    return Program(computations, entry)


def _instruction(name: str, rest: str) -> Instruction:
    shape = rest[: _end_of_shape(rest)]
    rest = rest[len(shape) :].lstrip()
    called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(rest)))
    opcode, _, attributes = rest.partition("(")
    return Instruction(name, shape, opcode, tuple(called), attributes)


def _end_of_shape(rest: str) -> int:
    """Where `f32[2]{0}` or a tuple of those ends; tuples nest."""
    depth = 0
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if letter == " " and depth == 0:
            return index
    raise ValueError(f"no shape in {rest!r}")
