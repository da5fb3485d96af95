"""What all programs share: passes in a table, arrivals, and slots given by liveness. NumPy only."""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pipejax.program import COLUMNS, WAYS
from pipejax.schedules.schedule import IntArray, Kind, Schedule


class Moment(enum.IntEnum):
    """The moments of a tick at which slots are touched, in order."""

    EARLY = 0
    LOAD = 1
    FORWARD = 2
    WRITE = 3
    BACKWARD = 4
    WEIGHTS = 5
    HEAD = 6
    RECEIVE = 7

    def of(self, tick: int) -> int:
        """Its place on a time line of moments."""
        return int(tick) * len(Moment) + self


@dataclasses.dataclass(frozen=True)
class Span:
    """One use of a slot, from one moment to another, both included.

    Attributes:
      start, end: moments on the time line.
      uses: the columns and ticks that get the slot.
    """

    start: int
    end: int
    uses: tuple[tuple[str, int], ...]

    @classmethod
    def between(cls, start: tuple[str, int, Moment], end: tuple[str, int, Moment]) -> Span:
        """From a write (column, tick, moment) to a read."""
        (writer, write_tick, write), (reader, read_tick, read) = start, end
        return cls(write.of(write_tick), read.of(read_tick), ((writer, int(write_tick)), (reader, int(read_tick))))

    @classmethod
    def instant(cls, column: str, tick: int, moment: Moment) -> Span:
        """A store that nobody will read."""
        return cls(moment.of(tick), moment.of(tick), ((column, int(tick)),))


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


def ticks_of(schedule: Schedule, kind: Kind) -> np.ndarray:
    """int64 [stages, microbatches], when each pass of a kind runs."""
    passes = schedule.passes[schedule.passes["kind"] == kind]
    at = np.full((schedule.placement.stages, schedule.microbatches), -1)
    at[schedule.placement.stage[passes["device"], passes["chunk"]], passes["microbatch"]] = passes["slot"]
    return at


class Table:
    """A program's table as it is filled."""

    def __init__(self, schedule: Schedule, ticks: int) -> None:
        self.schedule = schedule
        self.placement = schedule.placement
        self.stages = schedule.placement.stages
        self.columns = {name: np.zeros((schedule.devices, ticks), np.int32) for name in COLUMNS}

    def finish(self) -> IntArray:
        """int32 [devices, ticks, columns]."""
        return np.stack([self.columns[name] for name in COLUMNS], axis=-1)

    def place(self, letter: str, at: np.ndarray) -> None:
        """Writes which pass of a kind runs where; `at` is int [stages, microbatches], its tick."""
        stage, microbatch = np.indices(at.shape)
        where = self.placement.device[stage], at
        self.columns[f"{letter}_valid"][where] = 1
        self.columns[f"{letter}_chunk"][where] = self.placement.chunk[stage]
        self.columns[f"{letter}_microbatch"][where] = microbatch
        if letter == "f":
            self.columns["f_embed"][where] = stage == 0
            self.columns["f_head"][where] = stage == self.stages - 1
            self._share("embed", "f_embed", "f_microbatch")
            self._share("head", "f_head", "f_microbatch")
        elif letter == "b":
            self.columns["b_embed"][where] = stage == 0
            self._share("unembed", "b_embed", "b_microbatch")

    def _share(self, name: str, flag: str, microbatch: str) -> None:
        """Tells every device which microbatch one of them embeds, or runs the head of: one at most in a tick."""
        flags = self.columns[flag]
        self.columns[f"{name}_due"][:] = flags.max(axis=0)
        self.columns[f"{name}_microbatch"][:] = (flags * self.columns[microbatch]).max(axis=0)

    def allocate(self, device: int, spans: list[Span]) -> int:
        """Gives slots to a device's spans, writes them into the columns, and returns how many slots there are."""
        slots, count = assign_slots((span.start, span.end) for span in spans)
        for slot, span in zip(slots, spans, strict=True):
            for column, tick in span.uses:
                self.columns[column][device, tick] = slot
        return count

    def passes_on(self, device: int) -> Iterator[tuple[int, int]]:
        """(stage, microbatch) of all that a device runs."""
        for stage in np.flatnonzero(self.placement.device == device).tolist():
            for microbatch in range(self.schedule.microbatches):
                yield stage, microbatch

    def ways(self, step: int) -> tuple[int, ...]:
        """The ways that F (step 1) or B (step -1) hands its output, from stage to next stage."""
        stages = range(1, self.stages) if step == 1 else range(self.stages - 1)
        return tuple(sorted({self._way(stage - step, stage, step) for stage in stages}, reverse=True))

    def _way(self, source: int, target: int, step: int) -> int:
        shift = int(self.placement.device[target] - self.placement.device[source]) * step % self.schedule.devices
        return 0 if shift == 0 else step if shift == 1 else -step  # of two devices either is next to the other

    def forward_arrivals(self, at: np.ndarray, received: np.ndarray) -> int:
        """F's output of stage s - 1 is received at the end of its tick and kept until F of stage s takes it.

        Args:
          at: F's ticks.
          received: bool [ticks], when anything is received, garbage too.
        """
        return self._arrivals("f", received, lambda s: None if s == 0 else (s - 1, at), at, Moment.FORWARD)

    def backward_arrivals(self, at: np.ndarray, forward: np.ndarray, received: np.ndarray) -> int:
        """B's output of stage s + 1, or the head's cotangent, is kept until B of stage s takes it."""
        last = self.stages - 1
        return self._arrivals("b", received, lambda s: (s, forward) if s == last else (s + 1, at), at, Moment.BACKWARD)

    def _arrivals(
        self,
        letter: str,
        received: np.ndarray,
        source: Callable[[int], tuple[int, np.ndarray] | None],
        at: np.ndarray,
        taken: Moment,
    ) -> int:
        step = 1 if letter == "f" else -1
        columns = [f"{letter}_from_{WAYS[way]}" for way in self.ways(step)]
        most = 1  # also where nothing ever arrives, on one device
        for device in range(self.schedule.devices):
            spans = []
            for s, i in self.passes_on(device):
                if (origin := source(s)) is None:
                    continue
                stage, ticks = origin
                made: tuple[str, int, Moment]
                if letter == "b" and s == self.stages - 1:
                    made = "head_store", ticks[stage, i], Moment.HEAD
                else:
                    made = f"{letter}_from_{WAYS[self._way(stage, s, step)]}", ticks[stage, i], Moment.RECEIVE
                spans.append(Span.between(made, (f"{letter}_source", at[s, i], taken)))
            used = {use for span in spans for use in span.uses}
            spans += [
                Span.instant(column, tick, Moment.RECEIVE)
                for tick in np.flatnonzero(received).tolist()
                for column in columns
                if (column, tick) not in used
            ]
            most = max(most, self.allocate(device, spans))
        return most
