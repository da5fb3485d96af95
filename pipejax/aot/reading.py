"""What a compiled program does, read off its instructions: loops, host transfers, collectives, copies.

Nothing here is modelled; how long things take is `streams`' job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from pipejax.aot.hlo import Computation, Instruction, Module, Shape

Direction = Literal["d2h", "h2d", "h2h"]
Plain = tuple[str, tuple[int, ...]]  # element type and dimensions

# A copy smaller than this is no residual: loop counters, scalars, rows of tables.
LEAST_BYTES = 1 << 20

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# What names or groups buffers without touching their bytes, or only waits.
_FREE = frozenset(
    {
        "add-dependency",
        "after-all",
        "async-done",
        "async-update",
        "bitcast",
        "constant",
        "copy-done",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
_CONTROL = frozenset({"call", "conditional", "while"})


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One movement of bytes between pinned host memory and the device, in one trip of one computation.

    Attributes:
      name: the instruction that starts it.
      direction: "d2h", "h2d", or "h2h" for a copy within the host.
      bytes: how much moves.
      start, done: places in the schedule of its computation; the same place where nothing can overlap it.
      shape: of what moves.
    """

    name: str
    direction: Direction
    bytes: int
    start: int
    done: int
    shape: str

    @property
    def asynchronous(self) -> bool:
        """Whether other work is scheduled while it moves."""
        return self.done > self.start + 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
      name, kind: the instruction that starts it, and "collective-permute", "all-reduce" or the like.
      bytes: what one device sends, or receives where that is more.
      start, done: places in the schedule of its computation.
      pairs: of a collective-permute, who sends to whom.
      shapes: of the arrays that come out.
    """

    name: str
    kind: str
    bytes: int
    start: int
    done: int
    pairs: tuple[tuple[int, int], ...]
    shapes: tuple[Plain, ...]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a large buffer within one memory.

    Attributes:
      name, bytes, shape: the instruction, and what it copies.
      ring: whether the shape is that of a buffer that this loop carries from trip to trip and only reads or updates
        in slices. Such a copy moves all slots to touch one, each trip.
      on_host: whether the copied buffer lies in pinned host memory.
    """

    name: str
    bytes: int
    shape: str
    ring: bool
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Section:
    """A straight-line computation: the program's entry, or the body of one of its loops.

    Attributes:
      name: of the computation.
      trips: how often it runs a step; None for a loop whose count only the data tell.
      depth: loops around it.
      length: instructions in its schedule.
      dots: matrix products, those in fusions included.
      kernels: custom calls, by target or by the name of their kernel.
      transfers, collectives, copies: see there. Copies are those of `LEAST_BYTES` or more.
    """

    name: str
    trips: int | None
    depth: int
    length: int
    dots: int
    kernels: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]

    def moved(self, direction: Direction) -> int:
        """Bytes moved in a direction by one trip."""
        return sum(transfer.bytes for transfer in self.transfers if transfer.direction == direction)


def sections(module: Module) -> tuple[Section, ...]:
    """The entry and every loop body under it, outer before inner, in the order in which they are launched."""
    return tuple(_section(module, place) for place in _walk(module, _Place(module.entry, 1, 0, frozenset())))


def scheduled(module: Module) -> tuple[Computation, ...]:
    """The entry and every loop body and branch under it, each once."""
    computations = (place.computation for place in _walk(module, _Place(module.entry, 1, 0, frozenset())))
    return tuple({computation.id: computation for computation in computations}.values())


def sliced_carries(module: Module) -> frozenset[Shape]:
    """Large buffers that some loop carries from trip to trip and reads or updates in slices: rings, stacked weights."""
    loops = (
        instruction for part in scheduled(module) for instruction in part.instructions if instruction.opcode == "while"
    )
    return frozenset(shape for loop in loops for shape in _carried_slices(module, loop))


@dataclasses.dataclass(frozen=True)
class _Place:
    """A computation, how often it runs, and the rings of the loops around it."""

    computation: Computation
    trips: int | None
    depth: int
    rings: frozenset[Plain]


def _walk(module: Module, place: _Place) -> Iterator[_Place]:
    yield place
    for instruction in place.computation.instructions:
        if instruction.opcode == "while":
            count = instruction.trip_count
            yield from _walk(
                module,
                _Place(
                    module.body(instruction),
                    trips=None if count is None or place.trips is None else place.trips * count,
                    depth=place.depth + 1,
                    rings=place.rings | {plain(shape) for shape in _carried_slices(module, instruction)},
                ),
            )
        elif instruction.opcode in ("call", "conditional"):
            for called in instruction.called:
                yield from _walk(module, dataclasses.replace(place, computation=module.computations[called]))


def _section(module: Module, where: _Place) -> Section:
    computation = where.computation
    transfers, collectives, copies, kernels = [], [], [], []
    dots = 0
    for place, instruction in enumerate(computation.instructions):
        if instruction.opcode in _CONTROL or instruction.opcode in _FREE:
            continue
        dots += sum(inner.opcode == "dot" for inner in inside(module, instruction))
        done = _done(computation, instruction, place)
        if exchange := collective(module, computation, instruction):
            collectives.append(exchange)
        elif (shape := copied(module, computation, instruction)) is not None:
            if shape.bytes >= LEAST_BYTES:
                ring = plain(shape) in where.rings
                copies.append(Copy(instruction.name, shape.bytes, str(shape), ring, shape.on_host))
        elif moved := transfer(computation, instruction):
            direction, array = moved
            transfers.append(
                Transfer(instruction.name, direction, _total(array), place, done, " ".join(map(str, array)))
            )
        if (name := kernel_name(instruction)) and name != "AllocateBuffer":
            kernels.append(name)
    return Section(
        name=computation.name,
        trips=where.trips,
        depth=where.depth,
        length=len(computation.instructions),
        dots=dots,
        kernels=tuple(kernels),
        transfers=tuple(transfers),
        collectives=tuple(collectives),
        copies=tuple(copies),
    )


def free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time of its own: it renames buffers, or waits."""
    return instruction.opcode in _FREE or instruction.target == "AllocateBuffer"


def kernel_name(instruction: Instruction) -> str:
    """A custom call's target, or for a Pallas kernel the function that it was written in; else empty."""
    if instruction.opcode != "custom-call":
        return ""
    parts = instruction.op_name.split("/")
    if parts[-1] == "pallas_call" and len(parts) > 1:
        return parts[-2]
    return instruction.target


def inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """An instruction and what the computations that it calls hold, at any depth."""
    yield instruction
    if instruction.opcode in _CONTROL:
        return
    for called in instruction.called:
        for inner in module.computations[called].instructions:
            yield from inside(module, inner)


def collective(module: Module, computation: Computation, instruction: Instruction) -> Collective | None:
    """The collective that an instruction starts or is; None if it is none."""
    place = computation.place[instruction.id]
    done = _done(computation, instruction, place)
    inner, owner = instruction, computation
    if instruction.opcode == "async-start":
        owner = module.computations[instruction.called[0]]
        inner = owner.by_id[owner.root]
    kind = inner.opcode.removesuffix("-start")
    if kind not in _COLLECTIVES:
        return None
    sent = sum(owner.by_id[operand].shape.bytes for operand in inner.operands)
    result = inner.shape
    if inner.opcode in ("all-gather-start", "collective-permute-start"):  # (operand, result, context)
        result = inner.shape.parts[1]
    return Collective(
        name=instruction.name,
        kind=kind,
        bytes=max(sent, result.bytes),
        start=place,
        done=done,
        pairs=inner.pairs,
        shapes=tuple(plain(array) for array in result.arrays()),
    )


def transfer(computation: Computation, instruction: Instruction) -> tuple[Direction, tuple[Shape, ...]] | None:
    """Which way an instruction moves bytes between host and device, and the arrays that move; None if it does not."""
    if free(instruction) or instruction.opcode in _CONTROL:
        return None
    taken = [array for operand in instruction.operands for array in computation.by_id[operand].shape.arrays()]
    given = _given(instruction)
    if not any(array.on_host for array in (*taken, *given)):
        return None
    # Scalars among the operands say where in a buffer to read or write.
    device = tuple(array for array in taken if not array.on_host and array.dims)
    if not any(array.on_host for array in given):
        return "h2d", tuple(given)
    if device:
        return "d2h", device
    return "h2h", tuple(array for array in given if array.on_host)


def _given(instruction: Instruction) -> list[Shape]:
    """The arrays that an instruction gives; of the start of something asynchronous, those of its end."""
    shape = instruction.shape
    if instruction.opcode == "async-start":  # ((operands), result, context)
        shape = shape.parts[1]
    elif instruction.opcode == "copy-start":  # (result, operand, context)
        shape = shape.parts[0]
    return list(shape.arrays())


def _done(computation: Computation, start: Instruction, place: int) -> int:
    """Where in the schedule the end of what is started here is awaited."""
    if not start.opcode.endswith("-start"):
        return place
    ends = {user.id for user in computation.users.get(start.id, ()) if user.opcode.endswith("-done")}
    for later in range(place + 1, len(computation.instructions)):
        if computation.instructions[later].id in ends:
            return later
    return len(computation.instructions)


def copied(module: Module, computation: Computation, instruction: Instruction) -> Shape | None:
    """The buffer that an instruction copies within its memory, if that is all it does."""
    if not instruction.operands or not _only_copies(module, instruction):
        return None
    source, (result, *_) = computation.operand(instruction, 0).shape, _given(instruction)
    return result if source.on_host == result.on_host else None


def _only_copies(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in ("copy", "copy-start"):
        return True
    if instruction.opcode not in ("fusion", "async-start"):
        return False
    body = module.computations[instruction.called[0]]
    work = [inner for inner in body.instructions if inner.opcode not in _FREE]
    if len(work) != 1:
        return False
    return work[0].opcode in ("copy", "transpose") or _only_copies(module, work[0])


def _carried_slices(module: Module, loop: Instruction) -> frozenset[Shape]:
    carried = {plain(array): array for array in loop.shape.arrays() if array.bytes >= LEAST_BYTES}
    sliced = set()
    for computation, instruction in _all(module, module.body(loop)):
        if instruction.opcode in ("dynamic-slice", "dynamic-update-slice"):
            whole = computation.operand(instruction, 0).shape
            part = (
                instruction.shape
                if instruction.opcode == "dynamic-slice"
                else computation.operand(instruction, 1).shape
            )
            if part.elements < whole.elements:
                sliced.add(plain(whole))
    return frozenset(carried[key] for key in carried.keys() & sliced)


def _all(module: Module, computation: Computation) -> Iterator[tuple[Computation, Instruction]]:
    for instruction in computation.instructions:
        yield computation, instruction
        for called in instruction.called:
            yield from _all(module, module.computations[called])


def plain(shape: Shape) -> Plain:
    """A shape wherever it lies: inside fusions XLA does not note the memory."""
    return shape.dtype, shape.dims


def _total(arrays: tuple[Shape, ...]) -> int:
    return sum(array.bytes for array in arrays)
