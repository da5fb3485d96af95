"""Runs a timeline with its transfers again, event by event, on a link that may not be the one it was planned for.

Passes and transfers keep their orders; a B waits for its reload; two devices that share the way slow each other down
while they go the same way.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from pipejax.schedules.graph import NONE, device_orders, edges, rows_of
from pipejax.schedules.schedule import Kind
from pipejax.schedules.timeline import Direction, Timeline
from pipejax.schedules.transfers import Link


def replay(timeline: Timeline, link: Link) -> Timeline:
    """When passes and transfers run on a link, each as soon as it can.

    A reload still starts no earlier than planned: it would only take memory.

    Args:
      timeline: passes and transfers as planned; not in lockstep, where all devices wait for each other anyway.
      link: how fast the way to the host is. Its lanes must be those of the plan.

    Returns:
      The timeline as it comes out; longer than the plan where the link is slower.

    Raises:
      ValueError: a lockstep schedule.
    """
    if timeline.schedule.lockstep:
        raise ValueError(f"{timeline.schedule.name} is in lockstep; its ticks have no times of their own to replay.")
    events = _Events(timeline, link)
    events.run()
    passes = len(timeline.schedule.passes)
    start, stop = np.array(events.start), np.array(events.stop)
    transfers = timeline.transfers.copy()
    transfers["start"], transfers["stop"] = start[passes:], stop[passes:]
    return dataclasses.replace(timeline, start=start[:passes], stop=stop[:passes], transfers=transfers)


class _Events:
    """Operations are the passes, then the transfers; resources the devices, then the lanes."""

    def __init__(self, timeline: Timeline, link: Link) -> None:
        schedule, moved = timeline.schedule, timeline.transfers
        self.link, self.passes = link, len(schedule.passes)
        count = self.passes + len(moved)
        alone = link.k * timeline.costs.chunk / 2 / schedule.slices
        self.work = [*timeline.costs.durations(schedule).tolist(), *[alone] * len(moved)]
        self.start, self.stop = [0.0] * count, [0.0] * count
        self.missing = [0] * count  # what an operation still waits for
        self.after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        need = edges(schedule)
        for column in range(need.before.shape[1]):
            for row in np.flatnonzero(need.before[:, column] != NONE).tolist():
                self._wait(row, int(need.before[row, column]), timeline.costs.send * need.far[row, column])
        lanes = self._transfers(timeline)
        self.orders: list[list[int]] = [list(rows) for rows in device_orders(schedule)] + list(lanes.values())
        self.owner = [0] * count
        for resource, order in enumerate(self.orders):
            for op in order:
                self.owner[op] = resource
        self.place = [0] * len(self.orders)
        self.busy = [False] * len(self.orders)
        # Transfers under way: what is left of each, since when, and how fast it goes.
        self.left: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.device = moved["device"].tolist()
        self.direction = moved["direction"].tolist()
        self.planned = moved["start"].tolist()
        self.heap: list[tuple[float, int, bool, float]] = []

    def _wait(self, op: int, source: int, lag: float = 0.0) -> None:
        self.missing[op] += 1
        self.after[source].append((op, float(lag)))

    def _transfers(self, timeline: Timeline) -> dict[tuple[int, int], list[int]]:
        """What transfers wait for and what waits for them; their order on each lane."""
        schedule, rows = timeline.schedule, rows_of(timeline.schedule)
        lanes: dict[tuple[int, int], list[int]] = {}
        left: dict[tuple[int, int], int] = {}
        back: list[tuple[int, int, int]] = []
        for index, row in enumerate(timeline.transfers):
            op = self.passes + index
            unit = int(row["microbatch"]) * schedule.slices + int(row["slice"])
            stage = int(schedule.placement.stage[row["device"], row["chunk"]])
            if row["direction"] == Direction.OFFLOAD:
                self._wait(op, int(rows[Kind.F][stage, unit]))
                left[stage, unit] = op
            else:
                self._wait(int(rows[Kind.B][stage, unit]), op)
                back.append((op, stage, unit))
            lanes.setdefault((int(row["device"]), int(row["lane"])), []).append(op)
        for op, stage, unit in back:
            self._wait(op, left[stage, unit])
        return lanes

    def run(self) -> None:
        # (time, operation, whether it ends or one of its waits does, and for a transfer since when its speed holds).
        for index, way in enumerate(self.direction):
            if way == Direction.RELOAD:
                self.missing[self.passes + index] += 1
                heapq.heappush(self.heap, (self.planned[index], self.passes + index, False, 0.0))
        for resource in range(len(self.orders)):
            self._begin(resource, 0.0)
        while self.heap:
            now, op, ends, version = heapq.heappop(self.heap)
            if not ends:
                self.missing[op] -= 1
                self._begin(self.owner[op], now)
            elif op < self.passes or (op in self.left and self.since[op] == version):
                self._end(op, now)

    def _begin(self, resource: int, now: float) -> None:
        if self.busy[resource] or self.place[resource] == len(self.orders[resource]):
            return
        op = self.orders[resource][self.place[resource]]
        if self.missing[op]:
            return
        self.busy[resource] = True
        self.start[op] = now
        if op < self.passes:
            heapq.heappush(self.heap, (now + self.work[op], op, True, 0.0))
        else:
            self.left[op], self.since[op], self.rate[op] = self.work[op], now, 1.0
            self._speeds(op, now)

    def _end(self, op: int, now: float) -> None:
        self.stop[op] = now
        resource = self.owner[op]
        self.busy[resource] = False
        self.place[resource] += 1
        if op >= self.passes:
            del self.left[op]
            self._speeds(op, now)
        for other, lag in self.after[op]:
            heapq.heappush(self.heap, (now + lag, other, False, 0.0))
        self._begin(resource, now)

    def _speeds(self, op: int, now: float) -> None:
        """Sets the speed of this transfer, and of one that goes the same way on the same shared way."""
        index = op - self.passes
        pair, way = self.device[index] // 2, self.direction[index]
        together = [
            x
            for x in self.left
            if self.direction[x - self.passes] == way
            and (x == op or (self.link.shared and self.device[x - self.passes] // 2 == pair))
        ]
        for x in together:
            self.left[x] -= (now - self.since[x]) * self.rate[x]
            self.since[x] = now
            self.rate[x] = self.link.paired if len(together) > 1 else 1.0
            heapq.heappush(self.heap, (now + self.left[x] / self.rate[x], x, True, now))
