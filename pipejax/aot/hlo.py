"""A compiled program as XLA scheduled it: computations, instructions, shapes, decoded from its `HloModuleProto`.

Field numbers are those of xla/service/hlo.proto and xla/xla_data.proto.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

from pipejax.aot.wire import Message

HOST_SPACE = 5  # XLA's memory space of pinned host buffers, printed as S(5)

# xla.PrimitiveType: name and bits.
_TYPES: dict[int, tuple[str, int]] = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    13: ("tuple", 0),
    14: ("opaque", 0),
    15: ("c64", 64),
    16: ("bf16", 16),
    17: ("token", 0),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's or a tuple's shape.

    Attributes:
      dtype: XLA's name of the element type; "tuple" for tuples.
      dims: the array's dimensions.
      memory_space: 0 for device memory, `HOST_SPACE` for pinned host memory.
      parts: a tuple's elements.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int
    parts: tuple[Shape, ...]
    bits: int

    @property
    def bytes(self) -> int:
        """Bytes of the array; of a tuple, those of its arrays together."""
        if self.dtype == "tuple":
            return sum(part.bytes for part in self.parts)
        return math.ceil(math.prod(self.dims) * self.bits / 8)

    @property
    def elements(self) -> int:
        """How many elements the array has, or the arrays of a tuple together."""
        if self.dtype == "tuple":
            return sum(part.elements for part in self.parts)
        return math.prod(self.dims) if self.bits else 0

    @property
    def on_host(self) -> bool:
        """Whether the array lies in pinned host memory."""
        return self.memory_space == HOST_SPACE

    def arrays(self) -> Iterator[Shape]:
        """The arrays of a tuple, nested or not, in order; the array itself otherwise."""
        if self.dtype == "tuple":
            for part in self.parts:
                yield from part.arrays()
        else:
            yield self

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{'@host' if self.on_host else ''}"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction; `operands` and `called` are ids."""

    id: int
    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    op_name: str
    target: str  # of a custom call
    tuple_index: int
    parameter_number: int
    contracting: tuple[int, ...]  # dimensions of a dot's left side that are summed over
    pairs: tuple[tuple[int, int], ...]  # of a collective-permute
    _config: bytes

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's notes on the instruction, where they are JSON; else empty."""
        try:
            parsed = json.loads(self._config) if self._config else {}
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def trip_count(self) -> int | None:
        """Of a while loop, how often its body runs; None where XLA does not know."""
        known = self.config.get("known_trip_count")
        return int(known["n"]) if known else None


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A list of instructions, in the order in which they are launched where the module is scheduled."""

    id: int
    name: str
    instructions: tuple[Instruction, ...]
    root: int

    @functools.cached_property
    def by_id(self) -> dict[int, Instruction]:
        """Instructions by id."""
        return {instruction.id: instruction for instruction in self.instructions}

    @functools.cached_property
    def place(self) -> dict[int, int]:
        """For each instruction's id, its place in the order."""
        return {instruction.id: index for index, instruction in enumerate(self.instructions)}

    @functools.cached_property
    def users(self) -> dict[int, tuple[Instruction, ...]]:
        """For each instruction's id, those that take it as an operand."""
        found: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {key: tuple(values) for key, values in found.items()}

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """The instruction that gives an operand."""
        return self.by_id[instruction.operands[index]]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled module: its computations by id, and which of them is the entry."""

    name: str
    computations: dict[int, Computation]
    entry_id: int

    @property
    def entry(self) -> Computation:
        """The computation that the program starts with."""
        return self.computations[self.entry_id]

    def body(self, loop: Instruction) -> Computation:
        """A while loop's body."""
        return self.computations[loop.called[0]]

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions of all computations."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction


def parse(data: bytes) -> Module:
    """Decodes a serialised `HloModuleProto`, ordering instructions by its schedule where it has one."""
    return from_message(Message(data))


def from_message(message: Message) -> Module:
    """As `parse`, for a module inside another message."""
    order: dict[int, tuple[int, ...]] = {}
    for entry in message.message(7).messages(1):
        order[entry.integer(1)] = entry.message(2).integers(1)
    computations = {}
    for part in message.messages(3):
        computation = _computation(part, order)
        computations[computation.id] = computation
    return Module(name=message.text(1), computations=computations, entry_id=message.integer(6))


def _computation(message: Message, order: dict[int, tuple[int, ...]]) -> Computation:
    identifier = message.integer(5)
    instructions = [_instruction(part) for part in message.messages(2)]
    if identifier in order:
        place = {key: index for index, key in enumerate(order[identifier])}
        instructions.sort(key=lambda instruction: place[instruction.id])
    return Computation(id=identifier, name=message.text(1), instructions=tuple(instructions), root=message.integer(6))


def _instruction(message: Message) -> Instruction:
    shape = _shape(message.message(3))
    opcode = message.text(2)
    return Instruction(
        id=message.integer(35),
        name=message.text(1),
        opcode=opcode,
        shape=shape,
        operands=message.integers(36),
        called=message.integers(38),
        op_name=message.message(7).text(2),
        target=message.text(28),
        tuple_index=message.integer(13),
        parameter_number=message.integer(9),
        contracting=message.message(30).integers(1),
        pairs=tuple((pair.integer(1), pair.integer(2)) for pair in message.messages(52)),
        _config=message.raw(43),
    )


def _shape(message: Message) -> Shape:
    dtype, bits = _TYPES.get(message.integer(2), ("opaque", 0))
    return Shape(
        dtype=dtype,
        dims=message.integers(3),
        memory_space=message.message(5).integer(8),
        parts=tuple(_shape(part) for part in message.messages(4)),
        bits=bits,
    )
