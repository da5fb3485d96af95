"""A program in time, with the transfers that it makes: what the picture of a run shows. NumPy only."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.program import Program
from pipejax.schedules.schedule import Kind
from pipejax.schedules.simulate import simulate
from pipejax.schedules.timeline import TRANSFER_DTYPE, Direction, Timeline


def timeline(program: Program) -> Timeline:
    """When each pass and each transfer of a program runs, for T_F = T_B = T_W = 1; simulated.

    The transfers stand where the compiled tick has them: in a tick with F and B, F's residuals leave beside B for the
    chunk's input and the next B's come beside B for the weights; in a tick without B, those of the last tick's F leave
    beside F. Flush and prefetch, once a step, are drawn over the first and before the first tick of their phase.
    """
    schedule = program.schedule
    timed = simulate(schedule)
    if not program.offload:
        return timed
    begin = np.full(schedule.slots + 2, timed.stop.max())
    np.minimum.at(begin, schedule.passes["slot"], timed.start)
    begin = np.minimum.accumulate(begin[::-1])[::-1]
    both = {tick for phase in program.phases if phase.backward for tick in range(phase.start, phase.stop)}
    transfers = np.zeros(len(schedule.passes), TRANSFER_DTYPE)
    for row, each in zip(transfers, schedule.passes, strict=True):
        tick = int(each["slot"])
        for name in ("device", "chunk", "microbatch", "slice"):
            row[name] = each[name]
        row["direction"] = row["lane"] = Direction.OFFLOAD if each["kind"] == Kind.F else Direction.RELOAD
        if each["kind"] == Kind.F:
            row["start"] = begin[tick] + 1 if tick in both else begin[tick + 1]
            row["stop"] = row["start"] + 1
        else:
            row["stop"] = begin[tick]
            row["start"] = row["stop"] - 1
    order = np.lexsort((transfers["start"], transfers["lane"], transfers["device"]))
    return dataclasses.replace(timed, transfers=transfers[order])
