"""How often a loop of a compiled TPU program runs."""

import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import hlo

_UNKNOWN = "read how often it runs off the text, and teach this function."


def passes(program: hlo.Program, loop: hlo.Instruction) -> int | None:
    """How often a loop over a counter from 0 runs; None if it has no known limit.

    The counter need not go up by 1: loops that gather an operand of a product
    while they multiply are unrolled, and take two steps in a pass.
    """
    (condition,) = re.findall(r"condition=%?([\w.\-]+)", loop.attributes)
    names = _named(program, condition)
    compares = [x for x in names.values() if x.opcode == "compare"]
    limits = {
        x.name: [_constant(names[y]) for y in x.operands if _is_constant(names[y])]
        for x in compares
    }
    if not any(limits.values()):
        return None
    (compare,) = compares
    counter = names[compare.operands[0]]
    if counter.opcode != "get-tuple-element" or "LT" not in compare.attributes:
        raise ValueError(
            f"{loop.name} goes on by {compare.opcode}({compare.attributes}; " + _UNKNOWN
        )
    return math.ceil(limits[compare.name][0] / _step(program, loop, counter))


def _step(program: hlo.Program, loop: hlo.Instruction, counter: hlo.Instruction) -> int:
    """By how much a pass of a loop moves its counter.

    Raises:
      ValueError: if the body does not add a constant to it.
    """
    (body,) = re.findall(r"body=%?([\w.\-]+)", loop.attributes)
    names = _named(program, body)
    (index,) = re.findall(r"index=(\d+)", counter.attributes)
    returned = list(names.values())[-1]  # as XLA writes it, the root is the last
    after = returned
    if returned.opcode == "tuple":
        after = names[returned.operands[int(index)]]
    added = [names[x] for x in after.operands if x in names]
    steps = [_constant(x) for x in added if _is_constant(x)]
    if after.opcode != "add" or len(steps) != 1:
        raise ValueError(
            f"{loop.name} moves its counter by {after.opcode}({after.attributes}; "
            + _UNKNOWN
        )
    return steps[0]


def _named(program: hlo.Program, computation: str) -> dict[str, hlo.Instruction]:
    return {each.name: each for each in program.computations[computation]}


def _is_constant(instruction: hlo.Instruction) -> bool:
    return instruction.opcode == "constant"


def _constant(instruction: hlo.Instruction) -> int:
    return int(instruction.attributes.partition(")")[0])
