"""One record of what a program compiled for a GPU takes and does, and assertions about it for tests."""

from __future__ import annotations

import dataclasses

from pipejax.aot import memory, reading, streams
from pipejax.aot.compiling import Compiled
from pipejax.aot.memory import ArgumentKind, Part
from pipejax.aot.reading import Copy, Section
from pipejax.aot.streams import Projection, Trips
from pipejax.aot.targets import Target, load_target

# XLA's pool of pinned host memory stops here unless told otherwise.
POOL_LIMIT_BYTES = 64 * 10**9
POOL_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program, per device. All but `projected` is read from what XLA compiled.

    Attributes:
      target: what it was compiled for.
      devices: in its mesh.
      compile_seconds: what compiling took.
      device_bytes: device memory in all: arguments, outputs that take no argument's place, and temp.
      device_temp_bytes: device memory beyond arguments and outputs.
      host_bytes: pinned host memory.
      parts: device memory by purpose; the parts sum to `device_bytes`.
      sections: the program's entry and loop bodies, with their transfers, collectives and copies.
      projected: how long a step takes, modelled.
    """

    target: Target
    devices: int
    compile_seconds: float
    device_bytes: int
    device_temp_bytes: int
    host_bytes: int
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    projected: Projection

    @property
    def activation_bytes(self) -> int:
        """Device bytes at the peak beyond parameters, optimizer state and gradients: the paper's measure."""
        return memory.activation_bytes(self.parts)

    @property
    def node_host_bytes(self) -> int:
        """Pinned host memory of all the GPUs of a node together."""
        return self.host_bytes * min(self.devices, self.target.node_gpus)

    @property
    def fits(self) -> bool:
        """Whether device and node have the memory."""
        return self.device_bytes <= self.target.hbm_bytes and self.node_host_bytes <= self.target.node_host_bytes

    @property
    def ring_copies(self) -> tuple[Copy, ...]:
        """Copies, in loops, of whole buffers of slots; there should be none."""
        return tuple(copy for section in self.sections for copy in section.copies if copy.ring)

    def moved(self, direction: reading.Direction) -> int:
        """Bytes moved in a direction by a step; loops of unknown trip count are taken to run once."""
        return sum(section.moved(direction) * (section.trips or 1) for section in self.sections)

    def collective_bytes(self) -> dict[str, int]:
        """Bytes by kind of collective that a device sends in a step."""
        found: dict[str, int] = {}
        for section in self.sections:
            for collective in section.collectives:
                found[collective.kind] = found.get(collective.kind, 0) + collective.bytes * (section.trips or 1)
        return found


def report(
    compiled: Compiled,
    *,
    target: str | Target = "h100-80g",
    devices: int,
    unknown_trips: Trips | None = None,
    argument_kind: ArgumentKind | None = None,
) -> Report:
    """Reads a compiled program.

    Args:
      compiled: from `compile_for_gpu`.
      target: whose rates to project with.
      devices: in the mesh that it was compiled for.
      unknown_trips: see `streams.project`.
      argument_kind: see `memory.parts`.
    """
    target = target if isinstance(target, Target) else load_target(target)
    buffers = compiled.buffers
    return Report(
        target=target,
        devices=devices,
        compile_seconds=compiled.seconds,
        device_bytes=sum(allocation.bytes for allocation in buffers.allocations if not allocation.on_host),
        device_temp_bytes=buffers.total("temp"),
        host_bytes=sum(allocation.bytes for allocation in buffers.allocations if allocation.on_host),
        parts=memory.parts(compiled.module, buffers, kind=argument_kind),
        sections=reading.sections(compiled.module),
        projected=streams.project(compiled.module, target, devices=devices, unknown_trips=unknown_trips),
    )


def assert_no_ring_copies(report: Report) -> None:
    """Fails where a loop copies a whole buffer of slots, in device or host memory (DESIGN traps 2, 4, 5)."""
    found = report.ring_copies
    assert not found, "the program copies whole rings each trip: " + "; ".join(
        f"{copy.name} {copy.shape}, {copy.bytes} bytes" for copy in found
    )


def assert_device_bytes(report: Report, limit: int) -> None:
    """Fails where the program takes more device memory than `limit`, and says what takes it."""
    parts = ", ".join(f"{part.purpose} {part.bytes}" for part in report.parts)
    assert report.device_bytes <= limit, f"the program takes {report.device_bytes} bytes, more than {limit}: {parts}"


def assert_hidden(report: Report, fraction: float, *, section: str | None = None) -> None:
    """Fails where less than `fraction` of the time of host transfers is projected to be covered by compute.

    Args:
      report: of the program.
      fraction: at least so much must be hidden.
      section: the name of one section to look at; the whole step by default.
    """
    if section is None:
        hidden, exposed = report.projected.hidden_fraction, report.projected.exposed_transfer_seconds
    else:
        phase = next(phase for phase in report.projected.phases if phase.name == section)
        hidden, exposed = phase.hidden_fraction, phase.exposed_transfer_seconds
    assert hidden >= fraction, (
        f"{hidden:.4f} of the transfers' time is projected to be hidden, {exposed:.4f} s are exposed, where "
        f"{fraction} was asked for ({'; '.join(report.projected.assumptions)})"
    )
