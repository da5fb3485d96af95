"""From a schedule to the integer tables that the runtime scans over: slots, phases, transfers. NumPy only.

A tick of a device runs F of one chunk and B of another, layer by layer: the first layer of F beside the last of B, and
so on. F's input is taken from an arrival slot (or embedded), B's cotangent from another. For each pair of layers:

  1. read:  B's residuals come from the host ring, beside
  2. F:     which stores its residuals in a slot of the device's ring,
  3. write: or sends them to a slot of the host ring, beside
  4. B:     which takes its residuals from the device's ring, or those that were read.

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
import heapq
from collections.abc import Iterable

import numpy as np

from pipejax.schedules.schedule import IntArray, Kind, Schedule

# The moments of a tick at which slots are touched, in the order of the list above.
_EARLY_WRITE, _LOAD, _FORWARD, _WRITE, _BACKWARD, _HEAD, _RECEIVE, _MOMENTS = range(8)

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
    "host_write",  # host ring slot for the residuals of this tick's F
    "host_load",  # host ring slot of the residuals of this tick's B
    "host_next",  # of the next tick's B
    # The same on every device, for parts whose parameters are cut over the devices, so that all take part:
    "embed_due",  # 1 where any device's F embeds its input
    "embed_microbatch",
    "head_due",  # 1 where any device's F is followed by the head
    "head_microbatch",
    "unembed_due",  # 1 where any device's B is followed by the embedding's backward
    "unembed_microbatch",
)


# Ticks between F and B that the head, and a write and a read of the residuals, need at least.
TRANSFER_TICKS = 1


class ProgramError(ValueError):
    """A schedule that the runtime cannot run, or a program whose slots clash."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of ticks whose bodies are alike, scanned by one compiled loop.

    Attributes:
      start, stop: first tick, and one past the last.
      forward, backward: what the ticks run.
      flush: whether a phase without B has left its last residuals to be written before this one.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    flush: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What each device does at each tick, as data.

    Attributes:
      schedule: where it comes from.
      table: int32 [devices, ticks, len(COLUMNS)].
      phases: the scans, in order.
      forward_arrivals, backward_arrivals, residual_slots, host_slots: how many slots each buffer has.
      offload: whether residuals pass through the host ring.
      layers: positions in a chunk.
    """

    schedule: Schedule
    table: IntArray
    phases: tuple[Phase, ...]
    forward_arrivals: int
    backward_arrivals: int
    residual_slots: int
    host_slots: int
    offload: bool
    layers: int

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


def build(schedule: Schedule, *, offload: bool, layers: int) -> Program:
    """The program of a training step.

    Args:
      schedule: a checked schedule in lockstep form with unsplit backward and looping placement; every B must lie a
        tick or more after its F.
      offload: whether residuals pass through the host ring.
      layers: positions in a chunk. With several, B reads its residuals from the host during its own tick too.

    Raises:
      ProgramError: the schedule is not of that form, or leaves no tick for the transfers.
    """
    check_form(schedule)
    return _Builder(schedule, offload=offload, backward=True, layers=layers).build()


def build_forward(schedule: Schedule) -> Program:
    """The program of the same schedule's forward passes alone (for evaluation): no residuals, no backward."""
    check_form(schedule)
    return _Builder(schedule, offload=False, backward=False, layers=1).build()


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

    def __init__(self, schedule: Schedule, *, offload: bool, backward: bool, layers: int) -> None:
        self.schedule = schedule
        self.layers = layers
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
        if self.backward and (short := np.argwhere(self.at[Kind.B] - self.at[Kind.F] < TRANSFER_TICKS)).size:
            stage, microbatch = short[0]
            raise ProgramError(
                f"schedule {schedule.name!r} leaves no tick between F and B of stage {stage}, microbatch "
                f"{microbatch}: build it with transfer_ticks={TRANSFER_TICKS}."
            )
        self._share("embed", "f_embed", "f_microbatch")
        self._share("head", "f_head", "f_microbatch")
        self._share("unembed", "b_embed", "b_microbatch")
        phases = _phases(forward, backward, offload=self.offload)
        counts = {
            "forward_arrivals": self._forward_arrivals(forward),
            "backward_arrivals": self._backward_arrivals(backward) if self.backward else 0,
            "residual_slots": self._residuals(forward) if self.backward else 0,
            "host_slots": self._host(phases) if self.offload else 0,
        }
        return Program(
            schedule=schedule,
            table=np.stack([self.columns[name] for name in COLUMNS], axis=-1),
            phases=phases,
            offload=self.offload,
            layers=self.layers,
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

    def _share(self, name: str, flag: str, microbatch: str) -> None:
        """Tells every device which microbatch one of them embeds, or runs the head of: one at most in a tick."""
        flags = self.columns[flag]
        self.columns[f"{name}_due"][:] = flags.max(axis=0)
        self.columns[f"{name}_microbatch"][:] = (flags * self.columns[microbatch]).max(axis=0)

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

    def _host(self, phases: tuple[Phase, ...]) -> int:
        """Residuals on the host live from F to B, of whose layers the last is read at the start of its tick."""
        at = self.at
        written = {}  # tick of F -> the last moment of its write
        following = 0
        for phase in reversed(phases):
            for tick in reversed(range(phase.start, phase.stop) if phase.forward else ()):
                later = following if tick == phase.stop - 1 else tick + 1
                written[tick] = tick * _MOMENTS + _WRITE if phase.backward else later * _MOMENTS + _EARLY_WRITE
            following = phase.start
        most = 0
        for device in range(self.schedule.devices):
            spans = []
            for s, i in self._passes_on(device):
                f, b = at[Kind.F][s, i], at[Kind.B][s, i]
                read = _LOAD if self.layers == 1 else _BACKWARD
                spans.append(_Span.between("host_write", f, _WRITE, "host_load", b, read))
            used = {span.write_tick for span in spans}
            spans += [
                dataclasses.replace(_Span.instant("host_write", tick, _WRITE), end=end)
                for tick, end in written.items()
                if tick not in used
            ]
            most = max(most, self._allocate(device, spans))
        self.columns["host_next"][:, :-1] = self.columns["host_load"][:, 1:]
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
