"""Which activations spend their time on the host, a part of one each way in a tick, and when. NumPy only."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pipejax.program_table import Moment, Span, Table, assign_slots
from pipejax.schedules.schedule import Schedule

Unit = tuple[int, int]  # stage and microbatch
Ticks = tuple[np.ndarray, np.ndarray, np.ndarray]  # int [stages, microbatches] of F, B, W


@dataclasses.dataclass(frozen=True)
class Transfers:
    """When the parts of a device's activations leave and come: {unit: ticks in order}."""

    out: dict[Unit, list[int]]
    back: dict[Unit, list[int]]


# How long an activation may wait for its turn to leave or to come, in the time that a transfer takes. With little
# patience more stays on the device, with much a crowd of them holds its places longer.
_PATIENCE = (1, 2, 4, 16)


def _best_transfers(table: Table, device: int, units: list[Unit], at: Ticks, parts: int) -> Transfers:
    """The transfers for which the device needs the fewest slots."""

    def slots(transfers: Transfers) -> int:
        spans = _moving_spans(table, device, at, transfers)
        return assign_slots((span.start, span.end) for span in spans)[1]

    f, b, _ = at
    ticks = table.columns["f_valid"].shape[1]
    return min((_plan(units, f, b, parts, ticks, parts * patience) for patience in _PATIENCE), key=slots)


def _plan(units: list[Unit], f: np.ndarray, b: np.ndarray, parts: int, ticks: int, patience: int) -> Transfers:
    """Each part out at the earliest free tick after F, and back at the latest before B (paper, section 4).

    What would have to come back before all of it has left stays on the device, and leaves its place to others.
    """
    while True:
        out = _earliest(sorted(units, key=lambda unit: f[unit]), f, parts, patience)
        mirrored = _earliest(sorted(out, key=lambda unit: -b[unit]), ticks - 1 - b, parts, patience)
        back = {unit: [ticks - 1 - tick for tick in reversed(times)] for unit, times in mirrored.items()}
        late = [unit for unit in back if back[unit][0] <= out[unit][-1]]
        if not late:
            return Transfers({unit: out[unit] for unit in back}, back)
        # The shortest stays are the least worth moving: let them go first, then see again.
        late.sort(key=lambda unit: b[unit] - f[unit])
        gone = set(late[: max(1, len(late) // 2)])
        units = [unit for unit in back if unit not in gone]


def _earliest(units: list[Unit], after: np.ndarray, parts: int, patience: int) -> dict[Unit, list[int]]:
    """For units in the order in which they become ready, the first free ticks past each one's own.

    A unit that would wait for longer than is allowed is left out.
    """
    free, found = 0, {}
    for unit in units:
        ready = int(after[unit]) + 1
        first = max(free, ready)
        if first - ready <= patience:
            found[unit] = list(range(first, first + parts))
            free = first + parts
    return found


def parts_of(wanted: np.ndarray, plan: Schedule, passes: int, k: float | None) -> int:
    """Into how many parts a slot is cut, one of which moves each way in a tick.

    Args:
      wanted: bool [stages, microbatches], what moves.
      plan: the schedule in ticks.
      passes: in how many ticks a device runs all that it runs of one microbatch and chunk.
      k: where it is given, as much is moved in a tick as the tick hides; else two thirds of the ticks carry what moves
        in the long run.
    """
    if k is not None:
        return max(1, math.ceil(passes * k))
    most = max(int(wanted[plan.placement.device == device].sum()) for device in range(plan.devices))
    return max(1, 2 * passes * plan.chunks * plan.microbatches // max(3 * most, 1))


def place(table: Table, at: Ticks, wanted: np.ndarray, parts: int, stores: np.ndarray) -> tuple[int, int]:
    """Writes the transfers into a table.

    Args:
      table: has the passes already.
      at: when they run.
      wanted: bool [stages, microbatches].
      parts: of a slot.
      stores: bool [devices, ticks], where F stores garbage, for want of an F.

    Returns:
      How many slots the moving residuals need on a device, and how many on the host.
    """
    moving = host = 1
    for device in range(table.schedule.devices):
        units = [unit for unit in table.passes_on(device) if wanted[unit]]
        transfers = _best_transfers(table, device, units, at, parts)
        moving = max(moving, _moving(table, device, at, transfers, stores[device]))
        host = max(host, _host(table, device, transfers))
    return moving, host


def _moving_spans(table: Table, device: int, at: Ticks, transfers: Transfers) -> list[Span]:
    """The residuals that move live from F to W too, but for the time that they spend on the host."""
    spans = []
    for unit in table.passes_on(device):
        f, b, w = (int(ticks[unit]) for ticks in at)
        made, taken = [("f_move", f)], [("b_move", b), ("w_move", w)]
        if unit not in transfers.out:
            spans.append(Span(Moment.FORWARD.of(f), Moment.WEIGHTS.of(w), (*made, *taken)))
            continue
        out, back = transfers.out[unit], transfers.back[unit]
        leaving, coming = [("out_load", tick) for tick in out], [("in_store", tick) for tick in back]
        spans.append(Span(Moment.FORWARD.of(f), Moment.WRITE.of(out[-1]), (*made, *leaving)))
        spans.append(Span(Moment.LOAD.of(back[0]), Moment.WEIGHTS.of(w), (*coming, *taken)))
    return spans


def _moving(table: Table, device: int, at: Ticks, transfers: Transfers, stores: np.ndarray) -> int:
    for ticks, names in ((transfers.out, ("out_part",)), (transfers.back, ("in_part", "in_valid"))):
        for unit in ticks:
            for part, tick in enumerate(ticks[unit]):
                for name in names:
                    table.columns[name][device, tick] = part if name.endswith("part") else 1
    idle = [Span.instant("f_move", tick, Moment.FORWARD) for tick in np.flatnonzero(stores).tolist()]
    return table.allocate(device, _moving_spans(table, device, at, transfers) + idle)


def _host(table: Table, device: int, transfers: Transfers) -> int:
    """A host slot is taken from the first part that comes to the last that goes; other ticks write garbage."""
    spans = [
        Span(
            Moment.WRITE.of(out[0]),
            Moment.LOAD.of(transfers.back[unit][-1]),
            (*(("out_store", tick) for tick in out), *(("in_load", tick) for tick in transfers.back[unit])),
        )
        for unit, out in transfers.out.items()
    ]
    used = {tick for out in transfers.out.values() for tick in out}
    ticks = table.columns["out_store"].shape[1]
    spans += [Span.instant("out_store", tick, Moment.WRITE) for tick in range(ticks) if tick not in used]
    return table.allocate(device, spans)
