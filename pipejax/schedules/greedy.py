"""List scheduling: each device, whenever it is free, takes the most urgent pass that is ready and fits in memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pipejax.schedules.blocks import from_slots
from pipejax.schedules.costs import UNIT, Costs
from pipejax.schedules.schedule import Kind, Placement, Schedule
from pipejax.schedules.simulate import compact


def greedy(
    name: str,
    placement: Placement,
    *,
    devices: int,
    microbatches: int,
    limits: Sequence[int],
    split_backward: bool,
    costs: Costs = UNIT,
    deep_first: bool = True,
    group: int | None = None,
) -> Schedule:
    """B before F before W; B's of later stages first; F's as `deep_first` says; microbatches in order.

    Args:
      name: the schedule's name.
      placement: where each stage lives.
      devices: p.
      microbatches: m.
      limits: chunk-activations that each device may hold, at least its chunks. Later chunks have room kept for them,
        so that the pipeline never stalls for memory.
      split_backward: whether W's fill the gaps.
      costs: the times that decide what is ready.
      deep_first: whether F's of later chunks come before those of earlier ones.
      group: microbatches whose passes all come before those of the next such group; None for no groups.
    """
    group = microbatches if group is None else group
    state = _State(placement, devices, microbatches, limits, split_backward, costs, deep_first, group)
    state.run()
    order = np.stack([state.start[kind] for kind in state.kinds])
    ranks = np.unique(order, return_inverse=True)[1].reshape(order.shape)  # slots only give the order
    slots = dict(zip(state.kinds, ranks, strict=True))
    return compact(from_slots(name, placement, slots, devices=devices, microbatches=microbatches))


class _State:
    def __init__(
        self,
        placement: Placement,
        devices: int,
        microbatches: int,
        limits: Sequence[int],
        split_backward: bool,
        costs: Costs,
        deep_first: bool,
        group: int,
    ) -> None:
        self.group = group
        self.kinds = list(Kind) if split_backward else [Kind.F, Kind.B]
        self.last_kind = self.kinds[-1]
        self.stages = placement.stages
        self.device = placement.device.tolist()
        self.microbatches = microbatches
        self.costs = costs
        scale = costs.stage_scale or (1.0,) * self.stages
        times = costs.by_kind(split_backward=split_backward).tolist()
        self.time = [[times[kind] * scale[s] for s in range(self.stages)] for kind in range(3)]
        self.start = {kind: np.zeros((self.stages, microbatches)) for kind in self.kinds}
        self.stop: list[list[list[float]]] = [[[] for _ in range(self.stages)] for _ in range(3)]
        # When the next pass of each kind and stage has what it needs.
        self.ready = [[np.inf] * self.stages for _ in Kind]
        self.ready[Kind.F][0] = 0.0
        self.free = [0.0] * devices
        self.held = [0] * devices
        self.room = []  # how many activations may be there before an F of this stage
        chunks = self.stages // devices
        for s in range(self.stages):
            self.room.append(limits[self.device[s]] - (chunks - 1 - int(placement.chunk[s])))
        # A device's passes from most to least urgent.
        of = [sorted((s for s in range(self.stages) if self.device[s] == d), reverse=True) for d in range(devices)]
        self.candidates = [
            [(Kind.B, s) for s in mine]
            + [(Kind.F, s) for s in (mine if deep_first else reversed(mine))]
            + ([(Kind.W, s) for s in mine] if split_backward else [])
            for mine in of
        ]

    def run(self) -> None:
        events = [(0.0, d) for d in range(len(self.free))]
        left = len(self.kinds) * self.stages * self.microbatches
        frees: list[tuple[float, int]] = []
        while left:
            now, device = heapq.heappop(events)
            while frees and frees[0][0] <= now:
                self.held[heapq.heappop(frees)[1]] -= 1
            if self.free[device] > now:
                continue
            if (best := self._most_urgent(device, now)) is None:
                continue
            kind, stage = best
            left -= 1
            stop = now + self.time[kind][stage]
            self.start[kind][stage, len(self.stop[kind][stage])] = now
            self.stop[kind][stage].append(stop)
            self.free[device] = stop
            self._update(kind, stage)
            if kind == Kind.F:
                self.held[device] += 1
            if kind == self.last_kind:
                heapq.heappush(frees, (stop, device))
            heapq.heappush(events, (stop, device))
            # Whom it may have woken: the device of the next stage, where that is another one.
            after = stage + (1 if kind == Kind.F else -1)
            if kind != Kind.W and 0 <= after < self.stages and self.device[after] != device:
                heapq.heappush(events, (stop + self.costs.send, self.device[after]))

    def _most_urgent(self, device: int, now: float) -> tuple[Kind, int] | None:
        """What runs next; None where nothing is ready or fits."""
        best, earliest, held = None, self.microbatches, self.held[device]
        for kind, stage in self.candidates[device]:
            if self.ready[kind][stage] > now or (kind == Kind.F and held >= self.room[stage]):
                continue
            group = len(self.stop[kind][stage]) // self.group
            if group < earliest:
                best, earliest = (kind, stage), group
                if group == 0:
                    break
        return best

    def _update(self, kind: Kind, stage: int) -> None:
        """What a pass that was just placed changes: the next of its own, and what waited for it."""
        self.ready[kind][stage] = self._ready(kind, stage)
        step = 1 if kind == Kind.F else -1
        if kind != Kind.W and 0 <= stage + step < self.stages:
            self.ready[kind][stage + step] = self._ready(kind, stage + step)
        if (kind == Kind.F and stage == self.stages - 1) or kind == Kind.B:
            after = Kind.B if kind == Kind.F else Kind.W
            self.ready[after][stage] = self._ready(after, stage)

    def _ready(self, kind: Kind, stage: int) -> float:
        """When the next pass of a kind has what it needs; infinity while that is unknown."""
        index = len(self.stop[kind][stage])
        if index == self.microbatches:
            return np.inf
        if kind == Kind.W:
            source, at = Kind.B, stage
        elif kind == Kind.F:
            if stage == 0:
                return 0.0
            source, at = Kind.F, stage - 1
        elif stage == self.stages - 1:
            source, at = Kind.F, stage
        else:
            source, at = Kind.B, stage + 1
        done = self.stop[source][at]
        if len(done) <= index:
            return np.inf
        return done[index] + (self.costs.send if self.device[at] != self.device[stage] else 0.0)
