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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import hlo
import loops

# The second half of a pair, and what repeats its first half's operands.
_SECOND = ("-done", "-update")
_TILED = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]\{([\d,]*)(?::T\(([\d,]+)\))?")


class Transfer(NamedTuple):
    """One collective.

    Attributes:
      kind: such as "all-gather".
      across: whether it joins chips of several replicas.
      at_sync: whether it is executed at syncs only.
      times: how often a step executes it.
      size: chips that talk to each other, of one replica; or replicas.
      sharers: chips of each replica in it, if it joins replicas; 1 if not.
      given: bytes that go in on one chip, once.
      whole: bytes of the largest array that the chips have or get together, once.
      shape: of the result.
      origin: name of the operation in the traced program.
      source: file and line of it.
    """

    kind: str
    across: bool
    at_sync: bool
    times: int
    size: int
    sharers: int
    given: int
    whole: int
    shape: str
    origin: str
    source: str

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


class Flag(NamedTuple):
    """The reduction of the decision, in the schedule of the entry computation.

    Attributes:
      form: "all-reduce" is one instruction, for which the chip waits; "send and recv"
        are a pair that other instructions stand between.
      starts: instructions in front of it, as a share of all.
      ends: where its result is there.
      used: where its result, or what is computed from it alone, goes into a loop or
        conditional.
      loops_between: loops and fusions between start and end.
      last: where the last loop over the model's blocks ends.
    """

    form: str
    starts: float
    ends: float
    used: float
    loops_between: int
    last: float


class Reader:
    """A compiled program's text, and where the replicas are.

    Args:
      text: of `compiled.as_text()`.
      chips: of one replica. A program for several slices, each a replica, counts the
        chips of one slice only.
      slices: number of slices.
    """

    def __init__(self, text: str, chips: int, slices: int):
        self.program = hlo.parse(text)
        self.chips, self.slices = chips, slices
        self._sources = _sources(text)
        self._named = {
            name: {each.name: each for each in instructions}
            for name, instructions in self.program.computations.items()
        }

    def transfers(self) -> list[Transfer]:
        """All collectives, each once, largest first."""
        found: dict[tuple, Transfer] = {}
        for name, at_sync, times in self._visits():
            for each in self.program.computations[name]:
                if not each.communicates or each.opcode.endswith(_SECOND):
                    continue
                if each.opcode == "recv" or each.bytes == 0:
                    continue
                transfer = self._transfer(name, each, at_sync, times)
                # One that was made asynchronous stands in several computations.
                channel = re.search(r"channel_id=(\d+)", each.attributes)
                chain = re.search(r'chain_id="(\d+)"', each.attributes)
                key = (channel and channel[1], chain and chain[1], at_sync)
                key = key if chain else (name, each.name)
                found.setdefault(key, transfer)
        return sorted(found.values(), key=lambda x: -x.sent)

    def _visits(self) -> Iterator[tuple[str, bool, int]]:
        """Computations, whether they run at syncs only, and how often."""
        waiting, seen = [(self.program.entry, False, 1)], set()
        while waiting:
            name, at_sync, times = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            yield name, at_sync, times
            for each in self.program.computations[name]:
                if each.opcode.endswith(_SECOND):
                    continue
                inside, often = at_sync, times
                if each.opcode == "conditional":
                    inside = True
                elif each.opcode == "while":
                    passes = loops.passes(self.program, each)
                    inside, often = at_sync or passes is None, times * (passes or 1)
                waiting.extend((called, inside, often) for called in each.called)

    def _transfer(self, name, each: hlo.Instruction, at_sync, times) -> Transfer:
        operands = [self._named[name].get(x) for x in each.operands]
        sizes = [x.bytes for x in operands if x and x.shape != "token[]"]
        given = sum(sizes)
        attributes = each.attributes
        kind = re.sub("-start$", "", each.opcode)
        if kind == "send":
            (kind,) = re.findall(r'_transfer_type="([A-Z_]+)"', attributes)
            kind = kind.lower().replace("_", "-")
            across, size, sharers = True, self.slices, 1
        elif kind == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", attributes.partition("pairs=")[2])
            replicas = [{self._replica(int(x)) for x in pair} for pair in pairs]
            across, size, sharers = max(map(len, replicas)) > 1, 2, 1
        else:
            group = each.groups[0]
            replicas = len({self._replica(x) for x in group})
            across, size, sharers = replicas > 1, len(group), 1
            if across:
                size, sharers = replicas, len(group) // replicas
        whole = max(sizes, default=0) * (size * sharers if kind == "all-gather" else 1)
        frame = re.search(r"stack_frame_id=(\d+)", attributes)
        origin = re.search(r'op_name="([^"]*)"', attributes)
        return Transfer(
            *(kind, across, at_sync, times, size, sharers, given, whole),
            re.sub(r"\{[^}]*\}", "", each.shape)[:60],
            origin[1] if origin else "",
            self._sources.get(frame[1], "") if frame else "",
        )

    def _replica(self, partition: int) -> int:
        # What stays in the program of a slice stays in the slice.
        return 0 if self.slices > 1 else partition // self.chips

    def largest_arrays(self, number: int = 8) -> list[tuple[int, str, str, str]]:
        """Padded bytes, shape, origin and source of the largest that are computed."""
        found = {}
        fused = {
            called
            for instructions in self.program.computations.values()
            for each in instructions
            if each.opcode == "fusion" or "to_apply=" in each.attributes
            for called in each.called
        }
        views = ("parameter", "get-tuple-element", "tuple", "bitcast", "while")
        views += ("conditional", "copy-start", "optimization-barrier", "after-all")
        for name, instructions in self.program.computations.items():
            for each in instructions:
                if name in fused or each.opcode in views:
                    continue
                if each.opcode.endswith(_SECOND):
                    continue
                size = max(_padded(each.shape), default=0)
                origin = re.search(r'op_name="([^"]*)"', each.attributes)
                frame = re.search(r"stack_frame_id=(\d+)", each.attributes)
                key = (
                    size,
                    re.sub(r"\{[^}]*\}", "", each.shape)[:60],
                    f"{each.opcode} {origin[1] if origin else ''}",
                    self._sources.get(frame[1], "") if frame else "",
                )
                found[key] = found.get(key, 0) + 1
        top = sorted(found, reverse=True)[:number]
        return [(*key[:2], f"{found[key]} x {key[2]}", key[3]) for key in top]

    def flag(self) -> Flag | None:
        """Where the decision is reduced; None if it is not, or not in the entry."""
        entry = self.program.computations[self.program.entry]
        at = {each.name: index for index, each in enumerate(entry)}
        starts = [x for x in entry if x.communicates and self._is_flag(x)]
        if not starts:
            return None
        first, last = at[starts[0].name], at[starts[-1].name]
        done = [x for x in entry[last:] if x.opcode == "recv-done"]
        form, end, name = "all-reduce", last, starts[-1].name
        if starts[0].opcode == "send":
            form = "send and recv"
            recv = next(x for x in entry[first:] if x.opcode == "recv")
            (end, name) = next(
                (at[x.name], x.name) for x in done if recv.name in x.operands
            )
        known = [
            at[x.name]
            for x in entry
            if x.opcode == "while" and loops.passes(self.program, x) is not None
        ]
        used = self._first_use(entry, name, end)
        between = [x for x in entry[first + 1 : end] if x.opcode in ("while", "fusion")]
        count = len(entry)
        return Flag(
            form,
            *(round(x / count, 3) for x in (first, end, used)),
            len(between),
            round(max(known, default=0) / count, 3),
        )

    def _is_flag(self, each: hlo.Instruction) -> bool:
        return "pmax" in each.attributes and each.opcode not in ("recv", "recv-done")

    def _first_use(self, entry, name: str, start: int) -> int:
        """Where a loop or conditional is reached from this name."""
        reached = {name}
        for index, each in enumerate(entry[start + 1 :], start + 1):
            if reached & set(each.operands):
                if each.opcode in ("while", "conditional"):
                    return index
                reached.add(each.name)
        return len(entry)


def _sources(text: str) -> dict[str, str]:
    """Number of a stack frame -> "file:line"."""
    head = text.partition("\n%")[0]
    files = dict(re.findall(r'^(\d+) "([^"]*\.py)"$', head, re.MULTILINE))
    places = {
        number: f"{'/'.join(files[name].split('/')[-2:])}:{line}"
        for number, name, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)", head, re.MULTILINE
        )
        if name in files
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", head, re.MULTILINE)
    return {number: places.get(place, "") for number, place in frames}


def _padded(shape: str) -> Iterator[int]:
    """Bytes of every array of a shape, its last axes padded to whole tiles."""
    for kind, width, sizes, order, tile in _TILED.findall(shape):
        extents = [int(x) for x in sizes.split(",") if x]
        bits = 8 if kind == "pred" else int(width)
        minor = [int(x) for x in order.split(",") if x]
        for axis, step in zip(minor, reversed(tile.split(",")), strict=False):
            if step:
                extents[axis] = -(-extents[axis] // int(step)) * int(step)
        yield math.prod(extents) * bits // 8
