"""Runs a schedule as soon as possible, event by event. NumPy only."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.check import deadlock_error
from pipejax.schedules.costs import UNIT, Costs
from pipejax.schedules.graph import DeadlockError, device_orders, edges, run_orders
from pipejax.schedules.schedule import Kind, Schedule, sort_passes
from pipejax.schedules.timeline import Timeline


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """When each pass runs if every device keeps its order and starts each pass as soon as it can.

    In lockstep all devices start a tick together, and it lasts as long as the slowest.

    Args:
      schedule: a complete schedule.
      costs: how long passes take.

    Raises:
      ScheduleError: the devices wait for each other (rule "deadlock").
    """
    durations = costs.durations(schedule)
    if schedule.lockstep:
        start = _in_ticks(schedule, durations, costs.send)
    else:
        start = _as_soon_as_possible(schedule, durations, costs.send)
    return Timeline(schedule=schedule, costs=costs, start=start, stop=start + durations)


def as_planned(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """The schedule in its own slots, gaps kept, each slot as long as its longest pass.

    Only where no pass must wait for another longer than its slot says, so without time for communication.
    """
    if costs.send:
        raise ValueError("as_planned keeps a schedule's slots, which have no time for communication; use simulate.")
    durations = costs.durations(schedule)
    if schedule.lockstep:
        return simulate(schedule, costs)
    longest = np.zeros(schedule.slots)
    np.maximum.at(longest, schedule.passes["slot"], durations)
    longest[longest == 0] = durations.min()  # a slot that no device uses has the shortest pass's length
    start = np.concatenate([[0.0], np.cumsum(longest)])[schedule.passes["slot"]]
    return Timeline(schedule=schedule, costs=costs, start=start, stop=start + durations)


def compact(schedule: Schedule) -> Schedule:
    """The same orders, each pass in the earliest slot that dependencies leave it, every pass one slot long.

    Args:
      schedule: complete; its slots need only tell each device's order.

    Raises:
      ScheduleError: the devices wait for each other (rule "deadlock").
    """
    passes = sort_passes(schedule.passes)
    ordered = dataclasses.replace(schedule, passes=passes)
    slots = _as_soon_as_possible(ordered, np.ones(len(passes)), 0.0)
    passes["slot"] = np.rint(slots)
    return dataclasses.replace(schedule, passes=passes)


def _as_soon_as_possible(schedule: Schedule, durations: np.ndarray, send: float) -> np.ndarray:
    need = edges(schedule)
    try:
        start = run_orders(
            device_orders(schedule),
            need.before.tolist(),
            np.where(need.far, send, 0.0).tolist(),
            durations.tolist(),
        )
    except DeadlockError as deadlock:
        raise deadlock_error(schedule, deadlock) from None
    return np.array(start)


def _in_ticks(schedule: Schedule, durations: np.ndarray, send: float) -> np.ndarray:
    """A tick is compiled for the kinds that any device runs in it: F, B, W in turn, as long as the slowest."""
    passes = schedule.passes
    longest = np.zeros((schedule.slots, len(Kind)))
    np.maximum.at(longest, (passes["slot"], passes["kind"]), durations)
    stops = np.cumsum(longest.reshape(-1)).reshape(longest.shape) + send * np.arange(schedule.slots)[:, None]
    return (stops - longest)[passes["slot"], passes["kind"]]


def tables(schedule: Schedule, kind: Kind, values: np.ndarray) -> np.ndarray:
    """[stages, units], a per-pass array laid out by stage and unit for one kind."""
    rows = np.flatnonzero(schedule.passes["kind"] == kind)
    passes = schedule.passes[rows]
    out = np.zeros((schedule.placement.stages, schedule.microbatches * schedule.slices), values.dtype)
    stage = schedule.placement.stage[passes["device"], passes["chunk"]]
    out[stage, passes["microbatch"] * schedule.slices + passes["slice"]] = values[rows]
    return out
