"""From a schedule to the integer tables that the runtime scans over: slots, phases, transfers. NumPy only.

A tick of a device runs, in this order:

  1. F:     its input is taken from an arrival slot (or embedded), its residuals are stored in a slot;
            on the last stage the head turns F's output into a cotangent, stored in a backward arrival slot;
  2. write: F's residuals go to the host ring;
  3. B:     cotangent and residuals are taken from their slots;
  4. read:  the residuals of the next tick's B come from the host ring;
  5. receive: what the neighbours sent in this tick is stored in arrival slots.

(2) and (4) only where activations are offloaded. The write runs beside F's last matrix product and B for the chunk's
input, the read beside B for its weights; so neither needs a staging copy. In a phase without B nothing would cover the
write, so there a tick begins with the write of what the F of the tick before left, which runs beside this tick's F.
Every slot is given by liveness, per device; where a device has nothing to do its garbage goes to a slot that holds
nothing at that time.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from pipejax.schedules.schedule import IntArray, Kind, Schedule

# The moments of a tick at which slots are touched, in the order of the list above.
_EARLY_WRITE, _FORWARD, _HEAD, _WRITE, _BACKWARD, _READ, _RECEIVE, _MOMENTS = range(8)

COLUMNS = (
    "f_valid",  # 1 where the device runs an F
    "f_chunk",
    "f_microbatch",
    "f_embed",  # 1 where F is of the first stage: its input is embedded, not received
    "f_head",  # 1 where F is of the last stage: the head follows
    "f_source",  # forward arrival slot of F's input
    "f_store",  # residual slot (device ring) that F fills
    "f_receive",  # forward arrival slot for what arrives at the end of the tick
    "head_store",  # backward arrival slot for the head's cotangent
    "b_valid",
    "b_chunk",
    "b_microbatch",
    "b_embed",  # 1 where B is of the first stage: the embedding's backward follows
    "b_source",
    "b_load",
    "b_receive",
    "host_early",  # in a phase without B, and for a flush: host ring slot for the residuals of the last tick's F
    "host_write",  # in a phase with F and B: host ring slot for the residuals of this tick's F
    "host_read",  # host ring slot of the residuals of the next tick's B
)


# Ticks between F and B that a write and a read of the residuals need at least.
TRANSFER_TICKS = 1


class ProgramError(ValueError):
    """A schedule that the runtime cannot run, or a program whose slots clash."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of ticks whose bodies are alike, scanned by one compiled loop.

    Attributes:
      start, stop: first tick, and one past the last.
      forward, backward: what the ticks run.
      flush: where a phase without B has left its last residuals to be written, the tick whose host_early column says
        where they go; else None.
      prefetch: where nothing before this phase has read the residuals of its first B, the tick whose host_read
        column says where they are; else None.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    flush: int | None
    prefetch: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What each device does at each tick, as data.

    Attributes:
      schedule: where it comes from.
      table: int32 [devices, ticks, len(COLUMNS)].
      phases: the scans, in order.
      forward_arrivals, backward_arrivals, residual_slots, host_slots: how many slots each buffer has.
      offload: whether residuals pass through the host ring.
    """

    schedule: Schedule
    table: IntArray
    phases: tuple[Phase, ...]
    forward_arrivals: int
    backward_arrivals: int
    residual_slots: int
    host_slots: int
    offload: bool

    def column(self, name: str) -> IntArray:
        """int32 [devices, ticks], one column of the table."""
        return self.table[:, :, COLUMNS.index(name)]


def assign_slots(intervals: Iterable[tuple[int, int]]) -> tuple[list[int], int]:
    """Gives each closed interval [start, end] the lowest slot that is free all the while.

    Greedy by start, which needs as many slots as intervals ever overlap, the least there can be.

    Returns:
      The slot of each interval, in the order given, and the number of slots.
    """
    intervals = list(intervals)
    slots = [0] * len(intervals)
    busy: list[tuple[int, int]] = []  # (end, slot)
    free: list[int] = []
    count = 0
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[index]
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        slots[index] = slot
        heapq.heappush(busy, (end, slot))
    return slots, count


def build(schedule: Schedule, *, offload: bool) -> Program:
    """The program of a training step.

    Args:
      schedule: a checked schedule in lockstep form with unsplit backward and looping placement.
      offload: whether residuals pass through the host ring; every B must then lie two ticks or more after its F.

    Raises:
      ProgramError: the schedule is not of that form, or leaves no tick for the transfers.
    """
    check_form(schedule)
    return _Builder(schedule, offload=offload, backward=True).build()


def build_forward(schedule: Schedule) -> Program:
    """The program of the same schedule's forward passes alone (for evaluation): no residuals, no backward."""
    check_form(schedule)
    return _Builder(schedule, offload=False, backward=False).build()


def check_form(schedule: Schedule) -> None:
    """Refuses, by ProgramError, a schedule that the runtime cannot run."""
    if not schedule.lockstep or schedule.split_backward or schedule.slices != 1:
        raise ProgramError(
            f"schedule {schedule.name!r} cannot run in the pipeline yet: "
            "use a lockstep schedule (pj.schedules.GPipe, OneFOneB or Interleaved)."
        )
    if schedule.placement.name != "looping":
        raise ProgramError(f"schedule {schedule.name!r}: the pipeline runs the looping placement only.")


class _Builder:
    """Fills one table; kept apart from `Program` so that the record stays plain data."""

    def __init__(self, schedule: Schedule, *, offload: bool, backward: bool) -> None:
        self.schedule = schedule
        self.offload = offload
        self.backward = backward
        self.stages = schedule.devices * schedule.chunks
        self.ticks = schedule.slots if backward else int(_of_kind(schedule, Kind.F)["slot"].max()) + 1
        self.columns = {name: np.zeros((schedule.devices, self.ticks), np.int32) for name in COLUMNS}
        shape = (self.stages, schedule.microbatches)
        self.at = {kind: np.full(shape, -1) for kind in (Kind.F, Kind.B)}  # tick of each pass

    def build(self) -> Program:
        schedule = self.schedule
        for kind in (Kind.F, Kind.B) if self.backward else (Kind.F,):
            self._place(kind)
        forward, backward = (np.asarray(self.columns[f"{letter}_valid"].any(axis=0)) for letter in "fb")
        if self.offload and (short := np.argwhere(self.at[Kind.B] - self.at[Kind.F] < TRANSFER_TICKS)).size:
            stage, microbatch = short[0]
            raise ProgramError(
                f"schedule {schedule.name!r} leaves no tick for the transfers of stage {stage}, microbatch "
                f"{microbatch}: build it with transfer_ticks={TRANSFER_TICKS} to offload."
            )
        phases = _phases(forward, backward, offload=self.offload)
        counts = {
            "forward_arrivals": self._forward_arrivals(forward),
            "backward_arrivals": self._backward_arrivals(backward) if self.backward else 0,
            "residual_slots": self._residuals(forward) if self.backward else 0,
            "host_slots": self._host(backward, phases) if self.offload else 0,
        }
        return Program(
            schedule=schedule,
            table=np.stack([self.columns[name] for name in COLUMNS], axis=-1),
            phases=phases,
            offload=self.offload,
            **counts,
        )

    def _place(self, kind: Kind) -> None:
        """Writes which pass runs where, from the schedule's passes of one kind."""
        letter = kind.name.lower()
        passes = _of_kind(self.schedule, kind)
        device, tick = passes["device"], passes["slot"]
        stage = self.schedule.placement.stage[device, passes["chunk"]]
        self.at[kind][stage, passes["microbatch"]] = tick
        self.columns[f"{letter}_valid"][device, tick] = 1
        self.columns[f"{letter}_chunk"][device, tick] = passes["chunk"]
        self.columns[f"{letter}_microbatch"][device, tick] = passes["microbatch"]
        self.columns[f"{letter}_embed"][device, tick] = stage == 0
        if kind is Kind.F:
            self.columns["f_head"][device, tick] = stage == self.stages - 1

    def _allocate(self, device: int, spans: list[_Span]) -> int:
        """Gives slots to a device's spans, writes them into the columns, and returns how many slots there are."""
        slots, count = assign_slots((span.start, span.end) for span in spans)
        for slot, span in zip(slots, spans, strict=True):
            self.columns[span.writer][device, span.write_tick] = slot
            if span.reader:
                self.columns[span.reader][device, span.read_tick] = slot
        return count

    def _passes_on(self, device: int) -> Iterable[tuple[int, int]]:
        for stage in range(device, self.stages, self.schedule.devices):
            for microbatch in range(self.schedule.microbatches):
                yield stage, microbatch

    def _forward_arrivals(self, forward: np.ndarray) -> int:
        """F's output of stage s - 1 is received at the end of its tick and kept until F of stage s takes it."""
        at = self.at[Kind.F]
        most = 0
        for device in range(self.schedule.devices):
            spans = [
                _Span.between("f_receive", at[s - 1, i], _RECEIVE, "f_source", at[s, i], _FORWARD)
                for s, i in self._passes_on(device)
                if s > 0
            ]
            most = max(most, self._allocate(device, spans + _garbage(forward, spans, "f_receive", _RECEIVE)))
        return most

    def _backward_arrivals(self, backward: np.ndarray) -> int:
        """B's output of stage s + 1, or the head's cotangent, is kept until B of stage s takes it."""
        at = self.at[Kind.B]
        most = 0
        for device in range(self.schedule.devices):
            spans = [
                _Span.between("head_store", self.at[Kind.F][s, i], _HEAD, "b_source", at[s, i], _BACKWARD)
                if s == self.stages - 1
                else _Span.between("b_receive", at[s + 1, i], _RECEIVE, "b_source", at[s, i], _BACKWARD)
                for s, i in self._passes_on(device)
            ]
            most = max(most, self._allocate(device, spans + _garbage(backward, spans, "b_receive", _RECEIVE)))
        return most

    def _residuals(self, forward: np.ndarray) -> int:
        """Residuals that stay on the device live from F to B."""
        at = self.at
        most = 0
        for device in range(self.schedule.devices):
            spans = [
                _Span.between("f_store", at[Kind.F][s, i], _FORWARD, "b_load", at[Kind.B][s, i], _BACKWARD)
                for s, i in self._passes_on(device)
            ]
            most = max(most, self._allocate(device, spans + _garbage(forward, spans, "f_store", _FORWARD)))
        return most

    def _host(self, backward: np.ndarray, phases: tuple[Phase, ...]) -> int:
        """Residuals on the host live from the end of F, or from the tick after it, to the tick before B."""
        at = self.at
        most = 0
        prefetched = {phase.start for phase in phases if phase.prefetch is not None}
        writes = []  # every store, should it hold garbage
        for phase in phases:
            if phase.flush is not None:
                moment = phase.start * _MOMENTS + _EARLY_WRITE
                writes.append(_Span(moment, moment, "host_early", phase.flush, "", 0))
            if phase.forward:
                place = ("host_write", _WRITE) if phase.backward else ("host_early", _EARLY_WRITE)
                writes += [_Span.instant(place[0], tick, place[1]) for tick in range(phase.start, phase.stop)]
        for device in range(self.schedule.devices):
            spans = []
            for s, i in self._passes_on(device):
                f, b = int(at[Kind.F][s, i]), int(at[Kind.B][s, i])
                store = ("host_write", f, _WRITE) if backward[f] else ("host_early", f + 1, _EARLY_WRITE)
                span = _Span.between(*store, "host_read", b - 1, _READ)
                if b in prefetched:
                    # Read after the flush at the start of B's phase, if there is one.
                    span = dataclasses.replace(span, end=b * _MOMENTS + _EARLY_WRITE)
                spans.append(span)
            used = {(span.writer, span.write_tick) for span in spans}
            garbage = [span for span in writes if (span.writer, span.write_tick) not in used]
            most = max(most, self._allocate(device, spans + garbage))
        return most


@dataclasses.dataclass(frozen=True)
class _Span:
    """One use of a slot: from a write in one tick to a read in another; times count moments."""

    start: int
    end: int
    writer: str
    write_tick: int
    reader: str
    read_tick: int

    @classmethod
    def between(
        cls, writer: str, write_tick: int, write_moment: int, reader: str, read_tick: int, read_moment: int
    ) -> _Span:
        start, end = int(write_tick) * _MOMENTS + write_moment, int(read_tick) * _MOMENTS + read_moment
        return cls(start, end, writer, int(write_tick), reader, int(read_tick))

    @classmethod
    def instant(cls, writer: str, tick: int, moment: int) -> _Span:
        """A store that nobody will read."""
        return cls.between(writer, tick, moment, "", tick, moment)


def _of_kind(schedule: Schedule, kind: Kind) -> np.ndarray:
    return schedule.passes[schedule.passes["kind"] == kind]


def _garbage(ticks: np.ndarray, spans: list[_Span], writer: str, moment: int) -> list[_Span]:
    """Spans of no length for the ticks in which a device stores what nobody will read."""
    used = {span.write_tick for span in spans if span.writer == writer}
    return [_Span.instant(writer, int(tick), moment) for tick in np.flatnonzero(ticks) if int(tick) not in used]


def _phases(forward: np.ndarray, backward: np.ndarray, *, offload: bool) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    unwritten: int | None = None  # the tick after an F whose residuals are not written yet
    reading = False  # the last tick read ahead
    kinds = list(zip(forward.tolist(), backward.tolist(), strict=True))
    start = 0
    for stop in range(1, len(kinds) + 1):
        if stop < len(kinds) and kinds[stop] == kinds[start]:
            continue
        f, b = kinds[start]
        if f or b:
            flush = unwritten if b else None
            phases.append(
                Phase(start, stop, f, b, flush, prefetch=start - 1 if offload and b and not reading else None)
            )
            unwritten = stop if f and not b and offload else None if b else unwritten
        reading = b
        start = stop
    return tuple(phases)
