"""Programs of the forward passes alone, for evaluation: no residuals, no backward. NumPy only."""

from __future__ import annotations

import numpy as np

from pipejax.program import Phase, Program
from pipejax.program_table import Table
from pipejax.schedules.schedule import Kind, Schedule


def build(schedule: Schedule) -> Program:
    """Each device's forwards in the schedule's order, as soon as possible, one in a tick."""
    placement = schedule.placement
    at = np.zeros((placement.stages, schedule.microbatches), np.int64)
    passes = schedule.passes[schedule.passes["kind"] == Kind.F]
    free = np.zeros(schedule.devices, np.int64)
    for row in passes[np.argsort(passes["slot"], kind="stable")]:
        device, i = int(row["device"]), int(row["microbatch"])
        s = int(placement.stage[device, row["chunk"]])
        at[s, i] = max(free[device], at[s - 1, i] + 1 if s else 0)
        free[device] = at[s, i] + 1
    ticks = int(at.max()) + 1
    table = Table(schedule, ticks)
    table.place("f", at)
    return Program(
        schedule=schedule,
        phases=(Phase(0, ticks, forward=True, backward=False, flush=False),),
        layers=1,
        predicated=False,
        forward_ways=table.ways(1),
        backward_ways=(),
        forward_arrivals=table.forward_arrivals(at, np.ones(ticks, bool)),
        backward_arrivals=0,
        table=table.finish(),
    )
