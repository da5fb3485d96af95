"""Where a program's device memory goes: XLA's buffer assignment, sorted by what each buffer is for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from pipejax.aot import reading
from pipejax.aot.buffers import Allocation, Buffers, LiveBuffer
from pipejax.aot.hlo import Computation, Instruction, Module, Shape
from pipejax.aot.reading import Plain

ArgumentKind = Callable[[str], str]

_ORDER = (
    "parameters",
    "optimizer",
    "gradients",
    "inputs",
    "outputs",
    "rings",
    "staging",
    "weights in use",
    "workspace",
    "fragments",
)
# Everything of a step but parameters, optimizer state and gradients: what the paper calls activation memory.
_NOT_ACTIVATIONS = frozenset({"parameters", "optimizer", "gradients"})


@dataclasses.dataclass(frozen=True)
class Part:
    """What one purpose takes of device memory at the peak.

    Attributes:
      purpose: "parameters", "optimizer", "inputs" (of the step), "gradients", "outputs" (but gradients), "rings"
        (buffers of slots), "staging" (on the way from or to the host), "weights in use" (slices and casts of
        parameters, and weight gradients on their way to the accumulators), "workspace" (activations of the pass that
        runs), "fragments" (gaps that the allocator left).
      bytes: altogether.
      largest: the largest of its buffers, as "bytes shape instruction".
    """

    purpose: str
    bytes: int
    largest: tuple[str, ...]


def parts(module: Module, buffers: Buffers, *, kind: ArgumentKind | None = None) -> tuple[Part, ...]:
    """Sorts all device memory of a program by purpose. The parts sum to what XLA allocates.

    Args:
      module: the compiled program.
      buffers: its buffer assignment.
      kind: from an argument's name as JAX prints it, such as "params['layers']['up']", to "parameters", "optimizer" or
        "inputs"; by default names tell: `opt`, `mu`, `nu` for the optimizer, `params` or a leading `p`.
    """
    kind = kind or argument_kind
    found: dict[str, list[tuple[int, str]]] = {}

    def add(purpose: str, size: int, note: str) -> None:
        found.setdefault(purpose, []).append((size, note))

    purposes = _Purposes.of(module, kind)
    for allocation in buffers.allocations:
        if allocation.on_host or allocation.kind == "temp":
            continue
        add(purposes.allocation(allocation, kind), allocation.bytes, allocation.name or allocation.kind)
    for buffer in buffers.peak:
        add(purposes.buffer(buffer), buffer.bytes, f"{buffer.shape} {buffer.defined_by[-1].name}")
    add("fragments", buffers.fragments, "")
    return tuple(_part(purpose, found[purpose]) for purpose in _ORDER if purpose in found)


def activation_bytes(found: Iterable[Part]) -> int:
    """The paper's measure: device bytes at the peak beyond parameters, optimizer state and gradients."""
    return sum(part.bytes for part in found if part.purpose not in _NOT_ACTIVATIONS)


def argument_kind(name: str) -> str:
    """What an argument of a train step is, judged by its name."""
    if re.search(r"\b(opt|opt_state|optimizer|mu|nu|trace)\b", name):
        return "optimizer"
    return "parameters" if re.search(r"\bp(arams)?\b|\bparameters\b", name) else "inputs"


def _part(purpose: str, items: list[tuple[int, str]]) -> Part:
    largest = sorted(items, reverse=True)[:5]
    return Part(
        purpose=purpose,
        bytes=sum(size for size, _ in items),
        largest=tuple(f"{size} {note}" for size, note in largest if size and note),
    )


@dataclasses.dataclass(frozen=True)
class _Purposes:
    """Tells a temp buffer's purpose by where it comes from and where it goes."""

    accumulators: frozenset[Plain]  # gradients of parameters, sharded as those rest, and of gathered ones
    rings: frozenset[Shape]
    staged: frozenset[int]  # ids of instructions on the way from or to the host
    weights: frozenset[int]  # ids of instructions that make something of parameters alone
    weight_gradients: frozenset[int]  # ids of those whose results are added to a gradient

    @classmethod
    def of(cls, module: Module, kind: ArgumentKind) -> _Purposes:
        whole = set()
        for instruction in module.entry.instructions:
            if instruction.opcode == "parameter" and kind(instruction.op_name) == "parameters":
                dtype, dims = reading.plain(instruction.shape)
                whole |= {(dtype, dims), (dtype, dims[1:])} if dims[:1] == (1,) else {(dtype, dims)}
        places = frozenset(found for found in whole if len(found[1]) > 1)
        weights, gradients = set(), set()
        for computation in reading.scheduled(module):
            made = _from_parameters(computation, places)
            weights |= {inner.id for key in made for inner in reading.inside(module, computation.by_id[key])}
            # Gradients of what is gathered are as large as what was gathered.
            gathered = (reading.collective(module, computation, computation.by_id[key]) for key in made)
            places |= {shape for found in gathered if found and found.kind == "all-gather" for shape in found.shapes}
        accumulators = frozenset(("f32", dims) for _, dims in places)  # float32 whatever the parameters are
        for computation in reading.scheduled(module):
            gradients |= _into_gradients(computation, accumulators)
        return cls(
            accumulators=accumulators,
            rings=frozenset(
                shape for shape in reading.sliced_carries(module) if reading.plain(shape) not in places | accumulators
            ),
            staged=_staged(module),
            weights=frozenset(weights),
            weight_gradients=frozenset(gradients),
        )

    def allocation(self, allocation: Allocation, kind: ArgumentKind) -> str:
        if allocation.kind == "argument":
            return kind(allocation.name)
        is_gradient = any(reading.plain(shape) in self.accumulators for shape in allocation.shapes)
        return "gradients" if allocation.kind == "output" and is_gradient else "outputs"

    def buffer(self, buffer: LiveBuffer) -> str:
        ids = {instruction.id for instruction in buffer.defined_by}
        if buffer.shape in self.rings:
            return "rings"
        if len(ids) > 1 and reading.plain(buffer.shape) in self.accumulators:
            return "gradients"
        if ids & self.staged:
            return "staging"
        return "weights in use" if ids & (self.weights | self.weight_gradients) else "workspace"


def _large(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Operands that are arrays and not scalars."""
    operands = (computation.by_id[operand] for operand in instruction.operands)
    return [operand for operand in operands if operand.shape.elements > 1]


def _from_parameters(computation: Computation, whole: frozenset[Plain]) -> set[int]:
    found: set[int] = set()
    for instruction in computation.instructions:
        if instruction.opcode in ("tuple", "get-tuple-element", "parameter", "while"):
            continue
        operands = _large(computation, instruction)
        if operands and all(operand.id in found or reading.plain(operand.shape) in whole for operand in operands):
            found.add(instruction.id)
    return found


def _into_gradients(computation: Computation, accumulators: frozenset[Plain]) -> set[int]:
    """What is added into an accumulator: the other operand of an instruction that takes one and gives one back."""
    found: set[int] = set()
    for instruction in reversed(computation.instructions):
        if instruction.opcode == "bitcast" and instruction.id in found:
            found.add(instruction.operands[0])
        results = {reading.plain(array) for array in instruction.shape.arrays()}
        if instruction.opcode != "fusion" or not results & accumulators:
            continue
        operands = _large(computation, instruction)
        if any(reading.plain(operand.shape) in accumulators for operand in operands):
            found |= {operand.id for operand in operands if reading.plain(operand.shape) not in accumulators}
    return found


def _staged(module: Module) -> frozenset[int]:
    found = set()
    for computation in reading.scheduled(module):
        for instruction in computation.instructions:
            moved = reading.transfer(computation, instruction)
            if moved is None:
                continue
            found |= {inner.id for inner in reading.inside(module, instruction)}
            if moved[0] == "d2h":
                sources = (_source(computation, operand) for operand in instruction.operands)
                found |= {
                    source.id
                    for source in sources
                    if source.shape.dims and not source.shape.on_host and source.opcode != "parameter"
                }
    return frozenset(found)


def _source(computation: Computation, operand: int) -> Instruction:
    source = computation.by_id[operand]
    while source.opcode == "bitcast":
        source = computation.operand(source, 0)
    return source
