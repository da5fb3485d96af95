"""What each pass of a schedule waits for, and running every device's order as soon as possible."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from pipejax.schedules.schedule import Kind, Schedule

NONE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Edges:
    """Which passes must be done before each pass, besides the one before it on its device.

    Attributes:
      before: int64 [passes, 2], rows of `Schedule.passes`, NONE where there is none.
      far: bool [passes, 2], whether what is needed comes from another device.
    """

    before: np.ndarray
    far: np.ndarray


def rows_of(schedule: Schedule) -> np.ndarray:
    """int64 [kinds, stages, units], the row of each pass in the table; a unit is microbatch * slices + slice."""
    passes = schedule.passes
    units = schedule.microbatches * schedule.slices
    rows = np.full((len(Kind), schedule.placement.stages, units), NONE, np.int64)
    stage = schedule.placement.stage[passes["device"], passes["chunk"]]
    rows[passes["kind"], stage, passes["microbatch"] * schedule.slices + passes["slice"]] = np.arange(len(passes))
    return rows


def edges(schedule: Schedule) -> Edges:
    """The dependencies of a complete schedule."""
    rows = rows_of(schedule)
    forward, backward, weights = rows
    before = np.full((len(schedule.passes), 2), NONE, np.int64)
    before[forward[1:], 0] = forward[:-1]
    before[backward[:-1], 0] = backward[1:]
    before[backward[-1], 0] = forward[-1]
    if schedule.split_backward:
        before[weights, 0] = backward
    if schedule.slices > 1:
        # A causal slice reads the keys and values of those before it, and its B adds to their gradients.
        first = np.arange(forward.shape[1]) % schedule.slices == 0
        before[forward[:, ~first], 1] = forward[:, :-1][:, ~first[1:]]
        before[backward[:, :-1][:, ~first[1:]], 1] = backward[:, ~first]
    device = schedule.passes["device"]
    far = (before != NONE) & (device[before] != device[:, None])
    return Edges(before=before, far=far)


def device_orders(schedule: Schedule) -> list[range]:
    """The rows of each device's passes, in the order in which it runs them."""
    bounds = np.searchsorted(schedule.passes["device"], np.arange(schedule.devices + 1)).tolist()
    return [range(lo, hi) for lo, hi in itertools.pairwise(bounds)]


class DeadlockError(Exception):
    """Orders that wait for each other; `cycle` holds (row waiting, row waited for) pairs."""

    def __init__(self, cycle: list[tuple[int, int]]) -> None:
        super().__init__("deadlock")
        self.cycle = cycle


def run_orders(
    orders: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
    lags: Sequence[Sequence[float]],
    durations: Sequence[float],
    release: Sequence[float] | None = None,
) -> list[float]:
    """Starts each operation as soon as its resource is free and what it waits for is done.

    Args:
      orders: for each resource (a device, a transfer lane) its operations, in the order in which it runs them.
      before: for each operation the operations that it waits for; NONE is skipped.
      lags: as `before`, the time that must pass after each of them.
      durations: how long each operation takes.
      release: the earliest start of each operation; None for no limit.

    Returns:
      When each operation starts.

    Raises:
      DeadlockError: the orders wait for each other.
    """
    count = len(durations)
    owner = [0] * count
    for resource, order in enumerate(orders):
        for op in order:
            owner[op] = resource
    stop: list[float | None] = [None] * count
    start = [0.0] * count
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(orders)))
    done = 0
    while ready:
        resource = ready.pop()
        order = orders[resource]
        now = free[resource]
        at = position[resource]
        while at < len(order):
            op = order[at]
            begin = now if release is None or release[op] <= now else release[op]
            for source, lag in zip(before[op], lags[op], strict=True):
                if source < 0:
                    continue
                end = stop[source]
                if end is None:
                    waiting.setdefault(source, []).append(resource)
                    break
                if end + lag > begin:
                    begin = end + lag
            else:
                start[op] = begin
                stop[op] = now = begin + durations[op]
                at += 1
                done += 1
                if op in waiting:
                    ready.extend(waiting.pop(op))
                continue
            break
        position[resource], free[resource] = at, now
    if done != count:
        raise DeadlockError(_cycle(orders, before, position, owner, stop))
    return start


def _cycle(
    orders: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
    position: Sequence[int],
    owner: Sequence[int],
    stop: Sequence[float | None],
) -> list[tuple[int, int]]:
    """The circle of resources that wait for each other."""
    resource = next(r for r, order in enumerate(orders) if position[r] < len(order))
    seen: dict[int, int] = {}
    steps: list[tuple[int, int]] = []
    while resource not in seen:
        seen[resource] = len(steps)
        op = orders[resource][position[resource]]
        source = next(x for x in before[op] if x >= 0 and stop[x] is None)
        steps.append((op, source))
        resource = owner[source]
    return steps[seen[resource] :]
