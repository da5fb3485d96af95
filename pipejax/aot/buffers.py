"""XLA's buffer assignment: what is allocated, and what is alive when the program holds most.

Field numbers are those of xla/service/hlo.proto.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal

from pipejax.aot.hlo import HOST_SPACE, Instruction, Module, Shape
from pipejax.aot.wire import Message

_ALLOC, _FREE, _SHARE = range(3)

AllocationKind = Literal["argument", "output", "constant", "temp"]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One stretch of memory that the program needs.

    Attributes:
      kind: "argument" where the caller brings it, "output" where it is handed over, "constant", or "temp".
      bytes: its size.
      on_host: whether it is pinned host memory.
      name: of an argument, as JAX names it.
      donated: an argument whose memory an output takes over.
      shapes: of the arrays that fill it, one after the other.
    """

    kind: AllocationKind
    bytes: int
    on_host: bool
    name: str
    donated: bool
    shapes: frozenset[Shape]


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer of the temp memory that is alive at its peak.

    Attributes:
      bytes: its size.
      shape: of the array that it holds.
      defined_by: the instructions that write it; where it passes through loops there are several.
    """

    bytes: int
    shape: Shape
    defined_by: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """All memory of a program, on one device.

    Attributes:
      allocations: what is allocated.
      peak: what is alive in device temp memory when most is, largest first.
      peak_at: the instruction at which that is, and its computation.
      fragments: bytes of device temp memory that no buffer fills at the peak.
    """

    allocations: tuple[Allocation, ...]
    peak: tuple[LiveBuffer, ...]
    peak_at: tuple[str, str]
    fragments: int

    def total(self, kind: AllocationKind, *, on_host: bool = False) -> int:
        """Bytes of one kind in one memory."""
        return sum(a.bytes for a in self.allocations if a.kind == kind and a.on_host == on_host)


@dataclasses.dataclass(frozen=True)
class _Logical:
    bytes: int
    color: int
    instruction: Instruction
    shape: Shape


def decode(message: Message, module: Module) -> Buffers:
    """Decodes a `BufferAssignmentProto` of a module."""
    instructions = {instruction.id: instruction for _, instruction in module.instructions()}
    logical = {}
    for part in message.messages(1):
        place = part.message(3)
        instruction = instructions[place.integer(4)]
        shape = instruction.shape
        for index in place.integers(3):
            shape = shape.parts[index]
        logical[part.integer(1)] = _Logical(part.integer(2), part.integer(4), instruction, shape)
    arguments = {i.parameter_number: i.op_name for i in module.entry.instructions if i.opcode == "parameter"}
    allocations = tuple(
        _allocation(part, arguments, logical) for part in message.messages(3) if not part.integer(3)
    )  # 3: of one thread
    temp = sum(a.bytes for a in allocations if a.kind == "temp" and not a.on_host)
    live, at = _peak(message, logical)
    return Buffers(allocations, live, at, temp - sum(buffer.bytes for buffer in live))


def _allocation(message: Message, arguments: dict[int, str], logical: dict[int, _Logical]) -> Allocation:
    is_argument, is_output = message.integer(5), message.integer(7)
    kind: AllocationKind = "temp"
    if is_argument:
        kind = "argument"
    elif message.integer(12):
        kind = "constant"
    elif is_output:
        kind = "output"
    assigned = (logical[part.integer(1)] for part in message.messages(9))
    return Allocation(
        kind=kind,
        shapes=frozenset(buffer.shape for buffer in assigned if buffer.bytes == message.integer(2)),
        bytes=message.integer(2),
        on_host=message.integer(8) == HOST_SPACE,
        name=arguments.get(message.integer(6), "") if is_argument else "",
        donated=bool(is_argument and is_output),
    )


def _peak(message: Message, logical: dict[int, _Logical]) -> tuple[tuple[LiveBuffer, ...], tuple[str, str]]:
    """Follows the allocator's trace of the device's temp memory to the place where most is alive."""
    best: tuple[int, tuple[LiveBuffer, ...], tuple[str, str]] = (0, (), ("", ""))
    for trace in message.messages(4):
        events = [
            (event.integer(1), event.integer(2), event.integer(5), (event.text(4), event.text(3)))
            for event in trace.messages(1)
        ]
        if not events or logical[events[0][1]].color == HOST_SPACE:
            continue
        peak, length = _most(events, logical)
        if peak > best[0]:
            members, at = _alive(events[:length], logical)
            best = (peak, members, at)
    return best[1], best[2]


_Event = tuple[int, int, int, tuple[str, str]]


def _most(events: list[_Event], logical: dict[int, _Logical]) -> tuple[int, int]:
    """The most bytes alive, and after how many events they are."""
    owner: dict[int, int] = {}
    users: collections.Counter[int] = collections.Counter()
    now = most = length = 0
    for count, (kind, buffer, canonical, _) in enumerate(events, 1):
        if kind == _ALLOC:
            owner[buffer], users[buffer] = buffer, 1
            now += logical[buffer].bytes
        elif kind == _SHARE:
            owner[buffer] = owner.get(canonical, canonical)
            users[owner[buffer]] += 1
        else:
            users[owner[buffer]] -= 1
            if users[owner[buffer]] == 0:
                now -= logical[owner[buffer]].bytes
        if now > most:
            most, length = now, count
    return most, length


def _alive(events: list[_Event], logical: dict[int, _Logical]) -> tuple[tuple[LiveBuffer, ...], tuple[str, str]]:
    groups: dict[int, list[int]] = {}
    freed: collections.Counter[int] = collections.Counter()
    owner: dict[int, int] = {}
    for kind, buffer, canonical, _ in events:
        if kind == _FREE:
            freed[owner[buffer]] += 1
        else:
            owner[buffer] = owner.get(canonical, canonical) if kind == _SHARE else buffer
            groups.setdefault(owner[buffer], []).append(buffer)
    live = [
        LiveBuffer(
            bytes=logical[first].bytes,
            shape=logical[first].shape,
            defined_by=tuple(logical[member].instruction for member in members),
        )
        for first, members in groups.items()
        if freed[first] < len(members)
    ]
    return tuple(sorted(live, key=lambda buffer: -buffer.bytes)), events[-1][3]
