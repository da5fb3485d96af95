"""Moves W's to where a device would wait: F and B in a given order, W when nothing else can run."""

from __future__ import annotations

from collections import deque

import numpy as np

from pipejax.schedules.blocks import from_slots
from pipejax.schedules.graph import device_orders
from pipejax.schedules.schedule import Kind, Schedule


def refill(schedule: Schedule, limit: int) -> Schedule | None:
    """Runs each device's F's and B's in order, slot by slot, with a W wherever the next of them cannot run.

    Args:
      schedule: compact, backward split; only the order of its F's and B's counts.
      limit: chunk-activations a device may hold; an F that would exceed it waits for a W.

    Returns:
      A schedule in its slots, or None where the devices end up waiting for each other's memory.
    """
    passes = schedule.passes
    stage = schedule.placement.stage[passes["device"], passes["chunk"]].tolist()
    kind, microbatch = passes["kind"].tolist(), passes["microbatch"].tolist()
    last = schedule.placement.stages - 1
    queues = [deque(r for r in rows if kind[r] != Kind.W) for rows in device_orders(schedule)]
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in queues]
    held = [0] * schedule.devices
    never = np.iinfo(np.int64).max
    at = {k: np.full((last + 1, schedule.microbatches), never) for k in Kind}
    left, slot = len(passes), 0
    while left:
        ran = 0
        for device, queue in enumerate(queues):
            if queue:
                row = queue[0]
                s, i = stage[row], microbatch[row]
                if kind[row] == Kind.F:
                    able = held[device] < limit and (s == 0 or at[Kind.F][s - 1, i] < slot)
                else:
                    able = (at[Kind.F][s, i] if s == last else at[Kind.B][s + 1, i]) < slot
                if able:
                    queue.popleft()
                    at[Kind(kind[row])][s, i] = slot
                    if kind[row] == Kind.F:
                        held[device] += 1
                    else:
                        waiting[device].append((s, i))
                    ran += 1
                    continue
            if waiting[device]:
                at[Kind.W][waiting[device].popleft()] = slot
                held[device] -= 1
                ran += 1
        if not ran and not any((at[k] == slot - 1).any() for k in Kind):
            return None
        left -= ran
        slot += 1
    return from_slots(
        schedule.name, schedule.placement, at, devices=schedule.devices, microbatches=schedule.microbatches
    )
