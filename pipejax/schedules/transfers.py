"""Where activations leave the device and come back: which ones, and when on the transfer lanes. NumPy only.

An offload takes the earliest free place on its lane after F, a reload the latest before B (PipeOffload, arXiv
2503.01328, section 4). What cannot come back in time stays on the device, so a plan never delays a pass.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pipejax.schedules.schedule import Kind
from pipejax.schedules.simulate import tables
from pipejax.schedules.timeline import TRANSFER_DTYPE, Direction, Timeline, held_over_time

# How many starts of a lane's turns are tried within one round trip, the one with the lowest peak being taken.
_PHASES = 12
# Plans of so many activations in all get more added than the longest lifespans: all starts up to 2048 activations on a
# device, then only those with the lowest peaks so far, and a few at least. That bounds the time for many slices.
_EXTENDED = 2 * _PHASES * 2048
_FEWEST_EXTENDED = 6
# Adding what is left after the longest lifespans stops at batches of this share, which bounds the time for many passes.
_SMALLEST_BATCH = 1 / 64
# Times are sums of floats: this much is rounding.
_SLACK = 1e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """The way between device and host.

    Attributes:
      k: T_o / T_c, the time to offload and reload one chunk's activations over the time of its three passes, for a
        device that has the way to itself.
      lanes: 1 for offloads and reloads in turns on one lane; 2 for both at a time (full duplex).
      shared: whether devices 2 j and 2 j + 1 share the way. On one lane they then go in opposite directions at any
        time; on two they meet in both.
      paired: the speed of two devices that go the same way at a time on a shared way, as a share of one alone.
    """

    k: float = 1.0
    lanes: int = 1
    shared: bool = False
    paired: float = 0.5

    def __post_init__(self) -> None:
        if not self.k > 0:
            raise ValueError(f"Link: k is {self.k}; a transfer takes a time above 0.")
        if self.lanes not in (1, 2):
            raise ValueError(f"Link: lanes is {self.lanes}; pass 1 (in turns) or 2 (both directions at a time).")
        if not 0 < self.paired <= 1:
            raise ValueError(f"Link: paired is {self.paired}; pass a share of full speed, above 0 and at most 1.")

    def one_way(self, timeline: Timeline) -> float:
        """The time that a lane needs for the activations of one chunk and microbatch (or slice), in one direction."""
        alone = self.k * timeline.costs.chunk / 2 / timeline.schedule.slices
        # Nothing keeps neighbours on two shared lanes from meeting: plan for it.
        return alone / self.paired if self.shared and self.lanes == 2 else alone


def plan(
    timeline: Timeline,
    link: Link,
    *,
    chunks: int | None = None,
    memory_limit: float | None = None,
) -> Timeline:
    """Adds transfers to a timeline, longest lifespans first, as many as fit.

    Args:
      timeline: passes in time; they stay where they are.
      link: how fast, and how many at a time.
      chunks: how many chunks of each device to offload, those with the longest lifespans; None for any.
      memory_limit: chunk-activations on a device; where given, no more is offloaded than is needed to stay below.

    Returns:
      The timeline with its transfers. `offloaded_fraction` says how much was moved.
    """
    schedule = timeline.schedule
    if chunks is not None and not 0 <= chunks <= schedule.chunks:
        raise ValueError(f"plan: chunks is {chunks}; {schedule.name} has {schedule.chunks} on each device.")
    ready, needed = _windows(timeline)
    begin = tables(schedule, Kind.F, timeline.start)
    end = tables(schedule, Kind.W if schedule.split_backward else Kind.B, timeline.stop)
    width = link.one_way(timeline)
    moved = []
    for device in range(schedule.devices):
        stages = schedule.placement.stage[device]
        lane = _Lane(
            ready=ready[stages].reshape(-1),
            needed=needed[stages].reshape(-1),
            begin=begin[stages].reshape(-1),
            end=end[stages].reshape(-1),
            width=width,
            lanes=link.lanes,
        )
        order = _longest_first(needed[stages] - begin[stages], timeline.costs.chunk, chunks)
        chosen = lane.choose(order, _turns(link, device, width), memory_limit, unit=1 / schedule.slices)
        moved.append(_rows(timeline, link, device, chosen, width))
    return dataclasses.replace(timeline, transfers=_sorted(np.concatenate(moved)))


def _sorted(transfers: np.ndarray) -> np.ndarray:
    return transfers[np.lexsort((transfers["start"], transfers["lane"], transfers["device"]))]


def _ticks(timeline: Timeline) -> np.ndarray:
    """float64 [slots + 1], when each tick of a lockstep timeline starts, and when the last one ends."""
    ticks = np.full(timeline.schedule.slots + 1, timeline.stop.max())
    np.minimum.at(ticks, timeline.schedule.passes["slot"], timeline.start)
    return np.minimum.accumulate(ticks[::-1])[::-1]


def _windows(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """float64 [stages, units] each: when an activation can leave, and when it must be back."""
    schedule = timeline.schedule
    if not schedule.lockstep:
        return tables(schedule, Kind.F, timeline.stop), tables(schedule, Kind.B, timeline.start)
    # A tick moves what F left in the tick before and what B takes in the tick after: windows are whole ticks.
    ticks = _ticks(timeline)
    slot = schedule.passes["slot"]
    return tables(schedule, Kind.F, ticks[slot + 1]), tables(schedule, Kind.B, ticks[slot])


def _longest_first(lifespan: np.ndarray, grain: float, chunks: int | None) -> np.ndarray:
    """Indices into the flattened [chunks, units] of a device, longest lifespans first.

    Those that are equal up to `grain` come spread over the microbatches, so that half of them is every other one and
    a lane that cannot take all is not late with the first and idle for the last.
    """
    units = lifespan.shape[1]
    bits = max(units - 1, 1).bit_length()
    spread = np.array([int(format(unit, f"0{bits}b")[::-1], 2) for unit in range(units)])
    spread = np.broadcast_to(spread, lifespan.shape).reshape(-1)
    chunk = np.repeat(np.arange(len(lifespan)), units)
    order = np.lexsort((spread, chunk, -np.round(lifespan.reshape(-1) / grain)))
    if chunks is None:
        return order
    longest = np.argsort(-lifespan.mean(axis=1), kind="stable")[:chunks]
    return order[np.isin(chunk[order], longest)]


@dataclasses.dataclass(frozen=True)
class _Turns:
    """How one lane is divided among offloads and reloads.

    Attributes:
      phase: when its first place starts; each is as long as a transfer.
      strict: whether offloads and reloads take every other place, or any that is free.
    """

    phase: float
    strict: bool


def _turns(link: Link, device: int, width: float) -> list[_Turns]:
    if link.lanes == 2:
        return [_Turns(0.0, strict=False)]
    if link.shared:
        # Strict turns half a round apart: the two devices of a pair always go in opposite directions.
        return [_Turns(width * (device % 2), strict=True)]
    phases = np.arange(_PHASES) / _PHASES
    return [_Turns(2 * width * x, strict=True) for x in phases] + [_Turns(width * x, strict=False) for x in phases]


def _each_after(first: np.ndarray) -> np.ndarray:
    """The earliest places, none before `first` (which rises) and all at least 1 apart."""
    rank = np.arange(len(first))
    return np.maximum.accumulate(first - rank) + rank


def _each_before(last: np.ndarray) -> np.ndarray:
    """The latest places, none after `last` (which rises) and all at least 1 apart."""
    rank = np.arange(len(last))
    return np.minimum.accumulate((last - rank)[::-1])[::-1] + rank


def _ceil(x: np.ndarray) -> np.ndarray:
    return np.ceil(x - _SLACK)


def _floor(x: np.ndarray) -> np.ndarray:
    return np.floor(x + _SLACK)


@dataclasses.dataclass(frozen=True, eq=False)
class _Chosen:
    """Which activations of a device move, and when."""

    index: np.ndarray
    out: np.ndarray  # start of each offload
    back: np.ndarray  # start of each reload


_NOTHING = _Chosen(index=np.zeros(0, np.int64), out=np.zeros(0), back=np.zeros(0))


@dataclasses.dataclass(frozen=True, eq=False)
class _Lane:
    """The activations of one device, and when its lanes can move them.

    Attributes:
      ready, needed: float64 [n], the window that a round trip must fit in.
      begin, end: float64 [n], from the start of F to the end of W.
      width: the time of one transfer.
      lanes: 1 or 2.
    """

    ready: np.ndarray
    needed: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    width: float
    lanes: int

    # All activations by when they can leave and by when they must be back: sorted once, since `place` is called often.
    @functools.cached_property
    def first_ready(self) -> np.ndarray:
        return np.argsort(self.ready, kind="stable")

    @functools.cached_property
    def first_needed(self) -> np.ndarray:
        return np.argsort(self.needed, kind="stable")

    def place(self, index: np.ndarray, turns: _Turns) -> _Chosen | None:
        """The transfers of these activations, or None where some would come back before they have left."""
        moves = np.zeros(len(self.ready), bool)
        moves[index] = True
        leave, come = self.first_ready[moves[self.first_ready]], self.first_needed[moves[self.first_needed]]
        ready, last = self.ready[leave], self.needed[come] - self.width
        out, back = np.empty(len(moves)), np.empty(len(moves))
        if self.lanes == 2:
            out[leave] = _each_after(ready / self.width) * self.width
            back[come] = _each_before(last / self.width) * self.width
        elif turns.strict:  # a round is an offload's place and then a reload's
            width = 2 * self.width
            out[leave] = turns.phase + width * _each_after(_ceil((ready - turns.phase) / width))
            begin = turns.phase + self.width
            back[come] = begin + width * _each_before(_floor((last - begin) / width))
        else:  # reloads have their deadlines, offloads take the places between them
            taken = _each_before(_floor((last - turns.phase) / self.width))
            first = _ceil((ready - turns.phase) / self.width)
            free = _each_after(first - np.searchsorted(taken, first))  # counts places that are not taken
            place = free + np.searchsorted(taken - np.arange(len(taken)), free, side="right")
            out[leave], back[come] = turns.phase + self.width * place, turns.phase + self.width * taken
        out, back = out[index], back[index]
        if (back < out + self.width - _SLACK).any():
            return None
        return _Chosen(index=index, out=out, back=back)

    def choose(self, order: np.ndarray, ways: list[_Turns], memory_limit: float | None, *, unit: float) -> _Chosen:
        """As many as fit of `order`, the first ones before the others, in the turns with the lowest peak."""
        fits = order[self.needed[order] - self.ready[order] >= 2 * self.width - _SLACK]
        tried: list[tuple[tuple[float, int], _Chosen, _Turns]] = []
        for turns in ways:
            chosen = self._longest_prefix(fits, turns, guess=len(tried[-1][1].index) if tried else len(fits))
            tried.append(((self.peak(chosen, unit), -len(chosen.index)), chosen, turns))
        tried.sort(key=lambda each: each[0])
        (best_peak, _), best, best_turns = tried[0]
        # Late turns for all are worse than early ones for most: keep the prefix unless the rest helps.
        for _, chosen, turns in tried[: max(_EXTENDED // len(self.ready), _FEWEST_EXTENDED)]:
            candidate = self._add(chosen, fits[len(chosen.index) :], turns)
            peak = self.peak(candidate, unit)
            if (peak, -len(candidate.index)) < (best_peak, -len(best.index)):
                best, best_peak, best_turns = candidate, peak, turns
        if memory_limit is not None and best_peak <= memory_limit:
            return self._fewest(best, best_turns, memory_limit, unit)
        return best

    def peak(self, chosen: _Chosen, unit: float) -> float:
        """The most chunk-activations held at a time."""
        stay = np.ones(len(self.begin), bool)
        stay[chosen.index] = False
        begin = np.concatenate([self.begin, chosen.back])
        end = np.concatenate([self.end[stay], chosen.out + self.width, self.end[chosen.index]])
        return float(held_over_time(begin, end, unit=unit)[1].max(initial=0.0))

    def _longest_prefix(self, order: np.ndarray, turns: _Turns, *, guess: int) -> _Chosen:
        """The most of the first ones that fit; fewer always do, so steps that double from a guess find the number."""
        best, low, high = _NOTHING, 0, len(order) + 1
        middle, stride = guess, 1
        while high - low > 1:
            if (found := self.place(order[:middle], turns)) is None:
                high = middle
            else:
                best, low = found, middle
            if low == 0 or high == len(order) + 1:
                middle = middle + stride if low == middle else middle - stride
                stride *= 2
            if not low < middle < high:
                middle = (low + high) // 2
        return best

    def _add(self, chosen: _Chosen, rest: np.ndarray, turns: _Turns) -> _Chosen:
        """Adds what else fits, in halves down to small batches."""
        smallest = max(int(len(self.ready) * _SMALLEST_BATCH), 1)
        stack = [rest]
        while stack:
            batch = stack.pop()
            if not len(batch):
                continue
            if (more := self.place(np.concatenate([chosen.index, batch]), turns)) is not None:
                chosen = more
            elif len(batch) > smallest:
                half = len(batch) // 2
                stack += [batch[half:], batch[:half]]
        return chosen

    def _fewest(self, chosen: _Chosen, turns: _Turns, memory_limit: float, unit: float) -> _Chosen:
        """The shortest prefix that stays below the limit. Fewer transfers are never later, so halving finds it."""
        low, high = -1, len(chosen.index)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.place(chosen.index[:middle], turns)
            if found is not None and self.peak(found, unit) <= memory_limit:
                chosen, high = found, middle
            else:
                low = middle
        return chosen


def _rows(timeline: Timeline, link: Link, device: int, chosen: _Chosen, width: float) -> np.ndarray:
    schedule = timeline.schedule
    chunk, unit = np.divmod(chosen.index, schedule.microbatches * schedule.slices)
    rows = np.zeros((2, len(chosen.index)), TRANSFER_DTYPE)
    rows["device"] = device
    rows["chunk"] = chunk
    rows["microbatch"], rows["slice"] = np.divmod(unit, schedule.slices)
    for direction, start in ((Direction.OFFLOAD, chosen.out), (Direction.RELOAD, chosen.back)):
        rows[direction]["direction"] = direction
        rows[direction]["lane"] = direction if link.lanes == 2 else 0
        rows[direction]["start"], rows[direction]["stop"] = start, start + width
    return rows.reshape(-1)
