"""How long one instruction takes on a target, by what it computes, reads and writes. A model, not a reading."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from pipejax.aot import reading
from pipejax.aot.hlo import Computation, Instruction, Module, Shape
from pipejax.aot.targets import Target

# Seconds between the starts of two kernels that do nothing.
LAUNCH_SECONDS = 2e-6

# Products of queries by keys that a fused attention kernel does, each of 2·b·heads·s²·d FLOPs before masking. Pallas'
# backward computes scores and their cotangents twice, once for keys and values and once for queries.
_ATTENTION_PRODUCTS = {"mha_forward": 2, "mha_backward": 7}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an instruction does on the compute stream.

    Attributes:
      flops: of matrix products and known kernels, by element type.
      bytes: read from and written to device memory.
    """

    flops: tuple[tuple[str, float], ...]
    bytes: int

    @property
    def total_flops(self) -> float:
        """FLOPs of all element types."""
        return sum(flops for _, flops in self.flops)

    def seconds(self, target: Target) -> float:
        """The longer of computing and moving, and a launch."""
        compute = sum(flops / target.matmul_flops[dtype] for dtype, flops in self.flops)
        return max(compute, self.bytes / target.hbm_rate) + LAUNCH_SECONDS


def instruction_cost(module: Module, computation: Computation, instruction: Instruction) -> Cost:
    """The cost of an instruction that runs on the compute stream, or of what an asynchronous one there wraps."""
    if instruction.opcode == "async-start":
        computation = module.computations[instruction.called[0]]
        instruction = computation.by_id[computation.root]
    flops: dict[str, float] = {}
    for owner, inner in _with_owners(module, computation, instruction):
        if inner.opcode == "dot":
            left = owner.operand(inner, 0).shape
            summed = math.prod(left.dims[axis] for axis in inner.contracting)
            dtype = _rate_of(left.dtype)
            flops[dtype] = flops.get(dtype, 0) + 2.0 * inner.shape.elements * summed
    if products := _ATTENTION_PRODUCTS.get(reading.kernel_name(instruction)):
        batch, length, heads, width = computation.operand(instruction, 0).shape.dims
        keys = computation.operand(instruction, 1).shape.dims[1]
        # Half of the scores are masked, and the kernels skip them.
        flops["bf16"] = flops.get("bf16", 0) + products * 2.0 * batch * heads * length * keys * width / 2
    return Cost(tuple(sorted(flops.items())), _touched(module, computation, instruction))


def collective_seconds(collective: reading.Collective, target: Target, *, devices: int) -> float:
    """How long a collective takes: over NVLink within a node, else at the network's rate."""
    rate = target.nvlink_rate if _within_node(collective, target, devices) else target.network_rate
    factor = 2.0 if collective.kind == "all-reduce" else 1.0  # a reduction and a gather
    return factor * collective.bytes / rate + LAUNCH_SECONDS


def _within_node(collective: reading.Collective, target: Target, devices: int) -> bool:
    if collective.pairs:
        return all(source // target.node_gpus == to // target.node_gpus for source, to in collective.pairs)
    return devices <= target.node_gpus


def _rate_of(dtype: str) -> str:
    if dtype.startswith("f8"):
        return "f8"
    return dtype if dtype in ("bf16", "f16") else "f32"


def _with_owners(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    yield computation, instruction
    for called in instruction.called:
        body = module.computations[called]
        for inner in body.instructions:
            yield from _with_owners(module, body, inner)


def _touched(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes of device memory read and written; of what is sliced or updated in place only the slice."""
    operands = [computation.by_id[operand] for operand in instruction.operands]
    if instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * instruction.shape.bytes
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].shape.bytes
    if instruction.opcode != "fusion":
        return sum(operand.shape.bytes for operand in operands) + instruction.shape.bytes
    body = module.computations[instruction.called[0]]
    read = sum(_read(body, inner) for inner in body.instructions if inner.opcode == "parameter")
    root = body.by_id[body.root]
    results = [body.by_id[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written(body, result) for result in results)


def _read(body: Computation, parameter: Instruction) -> int:
    users = list(_users(body, parameter))
    sliced = ("dynamic-slice", "dynamic-update-slice", "gather", "slice")
    if users and all(user.opcode in sliced and is_whole for user, is_whole in users):
        # What is updated in place is not read.
        return sum(user.shape.bytes for user, _ in users if user.opcode != "dynamic-update-slice")
    return parameter.shape.bytes


def _users(body: Computation, value: Instruction) -> Iterator[tuple[Instruction, bool]]:
    """What takes a value, seen through bitcasts, and whether as the buffer that is sliced or updated."""
    for user in body.users.get(value.id, ()):
        if user.opcode == "bitcast":
            yield from _users(body, user)
        else:
            yield user, user.operands[0] == value.id


def _written(body: Computation, result: Instruction) -> int:
    while result.opcode == "bitcast":
        result = body.operand(result, 0)
    if result.opcode == "dynamic-update-slice":
        return body.operand(result, 1).shape.bytes
    return _device_bytes(result.shape)


def _device_bytes(shape: Shape) -> int:
    return sum(array.bytes for array in shape.arrays() if not array.on_host)
