"""Programs of lockstep schedules: in a tick all devices run the same kinds of work. NumPy only.

A tick of a device runs F of one chunk and B of another, layer by layer: the first layer of F beside the last of B, and
so on. F's input is taken from an arrival slot (or embedded), B's cotangent from another. For each pair of layers:

  1. read:  B's residuals come from the host ring, beside
  2. F:     which stores its residuals in a slot of the device's ring,
  3. write: or sends them to a slot of the host ring, beside
  4. B:     which takes its residuals from the device's ring, or those that were read.

Where only some activations move, they do so through slots of the device's ring, cut into parts: beside F one part comes
into such a slot, beside B one leaves another.

Then what the neighbours sent is stored in arrival slots, and on the last stage the head turns F's output into a
cotangent, stored in a backward arrival slot for a later tick's B.

(1) and (3) only where activations are offloaded; no more than a layer's residuals are ever on the way. In a phase
without B nothing would cover the write, so there a layer begins with the write of what the F of the layer before left,
which runs beside this layer's F. In a phase without F the read for the next layer's B runs beside this one's weight
gradients. Every slot is given by liveness, per device; where a device has nothing to do its garbage goes to a slot that
holds nothing at that time.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax import program_transfers
from pipejax.program import Phase, Program, ProgramError
from pipejax.program_table import Moment, Span, Table, ticks_of
from pipejax.schedules.schedule import Kind, Schedule

# Ticks between F and B that the head, and a write and a read of the residuals, need at least.
TRANSFER_TICKS = 1


def suits(schedule: Schedule) -> bool:
    """Whether a schedule runs this way: in lockstep, W with its B, around the ring."""
    looping = schedule.placement.name == "looping"
    return schedule.lockstep and looping and not schedule.split_backward and schedule.slices == 1


def build(
    schedule: Schedule, *, offload: bool, layers: int, wanted: np.ndarray | None = None, k: float | None = None
) -> Program:
    """The program of a training step.

    Args:
      schedule: a checked schedule that `suits`; every B must lie a tick or more after its F.
      offload: whether residuals pass through the host ring.
      layers: positions in a chunk. With several, B reads its residuals from the host during its own tick too.
      wanted: bool [stages, microbatches], the activations that are to move if not all of them are.
      k: paces those, see `program_transfers.parts_of`.

    Raises:
      ProgramError: the schedule leaves no tick between an F and its B.
    """
    f, b = ticks_of(schedule, Kind.F), ticks_of(schedule, Kind.B)
    if (short := np.argwhere(b - f < TRANSFER_TICKS)).size:
        stage, microbatch = short[0]
        raise ProgramError(
            f"schedule {schedule.name!r} leaves no tick between F and B of stage {stage}, microbatch {microbatch}: "
            f"build it with transfer_ticks={TRANSFER_TICKS}."
        )
    table = Table(schedule, schedule.slots)
    table.place("f", f)
    table.place("b", b)
    forward, backward = (np.asarray(table.columns[f"{letter}_valid"].any(axis=0)) for letter in "fb")
    partial = offload and wanted is not None
    phases = _phases(forward, backward, offload=offload and not partial)
    parts = moving = host = 0
    if offload and wanted is not None:
        parts = program_transfers.parts_of(wanted, schedule, 1, k)
        idle = forward & (table.columns["f_valid"] == 0)
        moving, host = program_transfers.place(table, (f, b, b), wanted, parts, idle)
    elif offload:
        host = _host(table, f, b, phases, layers)
    return Program(
        schedule=schedule,
        phases=phases,
        layers=layers,
        predicated=False,
        forward_ways=table.ways(1),
        backward_ways=table.ways(-1),
        forward_arrivals=table.forward_arrivals(f, forward),
        backward_arrivals=table.backward_arrivals(b, f, backward),
        residual_slots=_residuals(table, f, b, forward),
        moving_slots=moving,
        host_slots=host,
        offload=offload,
        parts=parts,
        table=table.finish(),
    )


def _residuals(table: Table, f: np.ndarray, b: np.ndarray, forward: np.ndarray) -> int:
    """Residuals that stay on the device live from F to B."""
    most = 0
    for device in range(table.schedule.devices):
        spans = [
            Span.between(("f_store", f[unit], Moment.FORWARD), ("b_load", b[unit], Moment.BACKWARD))
            for unit in table.passes_on(device)
        ]
        idle = forward & (table.columns["f_valid"][device] == 0)
        spans += [Span.instant("f_store", tick, Moment.FORWARD) for tick in np.flatnonzero(idle).tolist()]
        most = max(most, table.allocate(device, spans))
    return most


def _host(table: Table, f: np.ndarray, b: np.ndarray, phases: tuple[Phase, ...], layers: int) -> int:
    """Residuals on the host live from F to B, of whose layers the last is read at the start of its tick."""
    written = {}  # tick of F -> the last moment of its write
    following = 0
    for phase in reversed(phases):
        for tick in reversed(range(phase.start, phase.stop) if phase.forward else ()):
            later = following if tick == phase.stop - 1 else tick + 1
            written[tick] = Moment.WRITE.of(tick) if phase.backward else Moment.EARLY.of(later)
        following = phase.start
    read = Moment.LOAD if layers == 1 else Moment.BACKWARD
    most = 0
    for device in range(table.schedule.devices):
        spans = [
            Span.between(("host_write", f[unit], Moment.WRITE), ("host_load", b[unit], read))
            for unit in table.passes_on(device)
        ]
        busy = table.columns["f_valid"][device]
        spans += [
            dataclasses.replace(Span.instant("host_write", tick, Moment.WRITE), end=end)
            for tick, end in written.items()
            if not busy[tick]
        ]
        most = max(most, table.allocate(device, spans))
    table.columns["host_next"][:, :-1] = table.columns["host_load"][:, 1:]
    return most


def _phases(forward: np.ndarray, backward: np.ndarray, *, offload: bool) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    unwritten = False  # the last F's residuals
    kinds = list(zip(forward.tolist(), backward.tolist(), strict=True))
    start = 0
    for stop in range(1, len(kinds) + 1):
        if stop < len(kinds) and kinds[stop] == kinds[start]:
            continue
        f, b = kinds[start]
        if f or b:
            phases.append(Phase(start, stop, f, b, flush=unwritten and b))
            unwritten = offload and not b
        start = stop
    return tuple(phases)
