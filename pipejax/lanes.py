"""A program in time, with the transfers that it makes: what the picture of a run shows. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipejax.program import Program
from pipejax.schedules.schedule import Kind
from pipejax.schedules.simulate import as_planned
from pipejax.schedules.timeline import TRANSFER_DTYPE, Direction, Timeline

# A transfer: direction, device, chunk, microbatch, start and stop.
_Row = tuple[Direction, int, int, int, float, float]


def timeline(program: Program) -> Timeline:
    """When each pass and each transfer of a program runs, for T_F = T_B = T_W = 1; simulated.

    All devices start a tick together, and it lasts as long as its longest pass on any device; in lockstep F, B and W
    follow each other in it. The transfers stand where the compiled tick has them.

    In lockstep where all activations move, in a tick with F and B: those of B come beside F, those of F leave beside
    B; without B, those of the tick before leave beside F; without F, those of the next tick's B come beside W. What is
    left to write, or must be there first, where one kind of tick follows another, has a time of its own.

    Where only some move, a part of one comes beside the first half of a tick and a part of one leaves beside the
    second; a transfer is drawn from its first part to its last.
    """
    timed = as_planned(program.schedule)
    if not program.offload:
        return timed
    slot = program.schedule.passes["slot"]
    begin = np.full(program.table.shape[1] + 1, timed.stop.max())
    np.minimum.at(begin, slot, timed.start)
    begin = np.minimum.accumulate(begin[::-1])[::-1]
    if program.parts:
        rows = list(_parts(program, begin))
    else:
        wait = _waits(program)
        begin = begin + wait
        timed = dataclasses.replace(timed, start=timed.start + wait[slot], stop=timed.stop + wait[slot])
        rows = list(_layers(program, begin))
    transfers = np.zeros(len(rows), TRANSFER_DTYPE)
    names = ("direction", "device", "chunk", "microbatch", "start", "stop")
    for index, name in enumerate(names):
        transfers[name] = [row[index] for row in rows]
    transfers["lane"] = transfers["direction"]
    order = np.lexsort((transfers["start"], transfers["lane"], transfers["device"]))
    return dataclasses.replace(timed, transfers=transfers[order])


def _waits(program: Program) -> np.ndarray:
    """float64 [ticks + 1], how long the transfers between phases have held up a tick: nothing runs beside them."""
    extra = np.zeros(program.table.shape[1] + 1)
    for phase in program.phases:
        extra[phase.start] = phase.flush + (phase.backward and not phase.forward)
    return np.cumsum(extra)


def _layers(program: Program, begin: np.ndarray) -> Iterator[_Row]:
    """The transfers of a lockstep program in which all activations move; each takes as long as a pass."""
    kinds = {
        tick: (phase.forward, phase.backward) for phase in program.phases for tick in range(phase.start, phase.stop)
    }
    flushed = {phase.start: begin[phase.start] - 1 - (not phase.forward) for phase in program.phases if phase.flush}
    for each in program.schedule.passes:
        unit = int(each["device"]), int(each["chunk"]), int(each["microbatch"])
        tick = int(each["slot"])
        forward, backward = kinds[tick]
        if each["kind"] == Kind.F:
            start = begin[tick] + 1 if backward else flushed.get(tick + 1, begin[tick + 1])
            yield Direction.OFFLOAD, *unit, start, start + 1
        else:
            start = begin[tick] if forward else begin[tick] - 1
            yield Direction.RELOAD, *unit, start, start + 1


def _parts(program: Program, begin: np.ndarray) -> Iterator[_Row]:
    """The transfers of a program in which some activations move, found by following them through the slots."""
    column = program.column
    middle = (begin[:-1] + begin[1:]) / 2
    for device in range(program.schedule.devices):
        on_device: dict[int, tuple[int, int]] = {}  # slot -> chunk and microbatch
        on_host: dict[int, tuple[tuple[int, int] | None, int, int]] = {}  # and the ticks of its first and last part
        came: dict[tuple[int, int], int] = {}  # the tick of the first part that came back
        at = {
            name: column(name)[device]
            for name in (
                "f_valid", "f_chunk", "f_microbatch", "f_move", "out_load", "out_part", "out_store",
                "in_valid", "in_load", "in_part", "in_store",
            )
        }  # fmt: skip
        for tick in range(program.table.shape[1]):
            row = {name: int(values[tick]) for name, values in at.items()}
            if row["in_valid"]:
                unit, first, last = on_host[row["in_load"]]
                assert unit is not None
                came.setdefault(unit, tick)
                on_device[row["in_store"]] = unit
                if row["in_part"] == program.parts - 1:
                    yield Direction.OFFLOAD, device, *unit, float(middle[first]), float(begin[last + 1])
                    yield Direction.RELOAD, device, *unit, float(begin[came[unit]]), float(middle[tick])
            # Ticks in which nothing leaves write garbage, which is never read.
            leaving = on_device.get(row["out_load"])
            first = tick if row["out_part"] == 0 else on_host.get(row["out_store"], (None, tick, tick))[1]
            on_host[row["out_store"]] = leaving, first, tick
            if row["f_valid"]:
                on_device[row["f_move"]] = row["f_chunk"], row["f_microbatch"]
