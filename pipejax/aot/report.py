"""What a compiled program does with memory: read from XLA's own accounting and from its scheduled program text."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])([a-z][a-z0-9\-]*)\(")
_FUSED = re.compile(r" fusion\(.*\bcalls=%([\w.\-]+)")
_HOST = "S(5)"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One asynchronous copy between device and pinned host memory.

    Attributes:
      name: of its start instruction.
      computation: the loop body (or other computation) it runs in.
      to_host: its direction.
      bytes: moved each time it runs.
    """

    name: str
    computation: str
    to_host: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of an array within one memory space."""

    computation: str
    shape: tuple[int, ...]
    bytes: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program's memory and copies, per device.

    Attributes:
      device_temp_bytes: beyond arguments and outputs, at the peak.
      host_temp_bytes: pinned host memory.
      argument_bytes, output_bytes: parameters and batch; gradients.
      transfers: copies between the memory spaces, one entry for each place in the program.
      copies: synchronous copies within one memory space, of arrays and not scalars.
      sends: collective-permutes, by the computation they stand in.
    """

    device_temp_bytes: int
    host_temp_bytes: int
    argument_bytes: int
    output_bytes: int
    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    sends: tuple[str, ...]

    def ring_copies(self, slots: set[int]) -> tuple[Copy, ...]:
        """Copies of a whole ring: of anything on the host, or of an array with so many slots in front."""
        return tuple(
            copy for copy in self.copies if copy.on_host or (len(copy.shape) > 2 and copy.shape[0] in slots)
        )


def read(compiled: Any) -> Report:
    """Reads a `jax.stages.Compiled` for GPUs."""
    memory = compiled.memory_analysis()
    transfers, copies, sends = _scan(compiled.as_text())
    return Report(
        device_temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        transfers=transfers,
        copies=copies,
        sends=sends,
    )


def _arrays(text: str) -> list[tuple[tuple[int, ...], int, bool]]:
    """Shape, bytes and host placement of each array in a type."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        shape = tuple(int(size) for size in dims.split(",") if size)
        found.append((shape, math.prod(shape) * _BYTES.get(dtype, 0), _HOST in layout))
    return found


def _scan(text: str) -> tuple[tuple[Transfer, ...], tuple[Copy, ...], tuple[str, ...]]:
    transfers, copies, sends = [], [], []
    fused = set(_FUSED.findall(text))  # what stands in a fusion is part of one kernel: a copy there moves nothing
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header.group(1)
        if computation in fused or not (match := _INSTRUCTION.match(line)):
            continue
        name, rest = match.groups()
        opcode = _OPCODE.search(rest)
        if opcode is None:
            continue
        arrays = _arrays(rest[: opcode.start(1)])
        if opcode.group(1) == "collective-permute-start":
            sends.append(computation)
        elif opcode.group(1).endswith("-start") and any(host for _, _, host in arrays):
            on_device = [size for shape, size, host in arrays if not host and shape]
            if on_device:
                # A start's type is (operands, result, context): a write's result is the host ring.
                hosts = [index for index, (_, _, host) in enumerate(arrays) if host]
                transfers.append(Transfer(name, computation, len(hosts) > 1, max(on_device)))
        elif opcode.group(1) == "copy" and arrays and len(arrays[0][0]) > 0:
            shape, size, host = arrays[0]
            copies.append(Copy(computation, shape, size, host))
    return tuple(transfers), tuple(copies), tuple(sends)
