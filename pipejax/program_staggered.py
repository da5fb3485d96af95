"""Programs of all other schedules: devices do different kinds of work in a tick, under predicates. NumPy only.

A tick of a device runs one of these, where its table says so (or several in turn, in schedules of ticks):

  1. F:     its residuals are stored in a slot of the device's ring,
  2. B:     takes them from there and hands over to W what it makes, in a slot of the stash ring,
  3. W:     takes both.

Then the head runs, and what the neighbours sent is stored in arrival slots, as in lockstep.

Where activations are offloaded, a slot is cut into equal parts. Beside the first half of whatever pass a tick runs, a
part comes from the host into its residual slot; beside the second half a part goes there.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pipejax.program import Phase, Program, ProgramError
from pipejax.program_table import Moment, Span, Table, assign_slots, ticks_of
from pipejax.schedules.schedule import Kind, Schedule
from pipejax.schedules.simulate import compact


def build(schedule: Schedule, *, wanted: np.ndarray | None, layers: int, k: float | None = None) -> Program:
    """The program of a training step.

    Args:
      schedule: checked; the unit of work is a microbatch.
      wanted: bool [stages, microbatches], the activations that are to spend their time on the host; those whose time
        between F and B is too short for it stay. None where no transfer is to be compiled at all. Only for schedules
        in which a device runs one pass at a time.
      layers: positions in a chunk.
      k: the time of a round trip of a chunk's residuals over that of its passes, if it is known: as much is moved in a
        tick as the tick hides. Else as much as is needed, and half as much again.

    Raises:
      ProgramError: the unit is a slice of a sequence, or transfers are wanted in a schedule of several passes a tick.
    """
    if wanted is not None and schedule.lockstep:
        raise ProgramError(
            f"schedule {schedule.name!r} runs several passes in a tick, beside which part of the activations cannot "
            "move: offload all of them with Offload.full() and W left with its B, or take a staggered schedule such as "
            "pj.schedules.POH."
        )
    if schedule.slices != 1:
        raise ProgramError(
            f"schedule {schedule.name!r} cuts sequences into {schedule.slices} slices, which the pipeline cannot run: "
            "blocks would have to carry keys and values from slice to slice; use a schedule of whole microbatches."
        )
    # Passes of any length take one tick here, so only their order counts.
    plan = schedule if schedule.lockstep else compact(schedule)
    f, b = ticks_of(plan, Kind.F), ticks_of(plan, Kind.B)
    w = ticks_of(plan, Kind.W) if plan.split_backward else b
    if (f >= b).any():
        raise ProgramError(f"schedule {schedule.name!r} runs a B in the tick of its F; build it with transfer_ticks=1.")
    table = Table(plan, plan.slots)
    for letter, at in (("f", f), ("b", b), ("w", w)):
        table.place(letter, at)
    always = np.ones(plan.slots, bool)
    parts = 1
    moves: dict[int, _Transfers] = {}
    if wanted is not None:
        kinds = 3 if plan.split_backward else 2
        parts = _parts(plan, wanted, kinds) if k is None else max(1, math.ceil(kinds * k))
        for device in range(plan.devices):
            units = [unit for unit in table.passes_on(device) if wanted[unit]]
            moves[device] = _best_transfers(table, device, units, (f, b, w), parts)
    residuals = stash = moving = host = 0
    for device in range(plan.devices):
        residuals = max(residuals, _residuals(table, device, f, b, w))
        stash = max(stash, _stash(table, device, b, w))
        if wanted is not None:
            moving = max(moving, _moving(table, device, (f, b, w), moves[device]))
            host = max(host, _host(table, device, moves[device]))
    return Program(
        schedule=plan,
        phases=(Phase(0, plan.slots, forward=True, backward=True, flush=False),),
        layers=layers,
        predicated=True,
        forward_ways=table.ways(1),
        backward_ways=table.ways(-1),
        forward_arrivals=table.forward_arrivals(f, always),
        backward_arrivals=table.backward_arrivals(b, f, always),
        residual_slots=residuals,
        stash_slots=stash,
        moving_slots=moving,
        host_slots=host,
        offload=wanted is not None,
        parts=parts,
        table=table.finish(),
    )


def _parts(plan: Schedule, wanted: np.ndarray, kinds: int) -> int:
    """Into how many parts a slot is cut so that two thirds of the ticks carry what moves in the long run."""
    most = max(int(wanted[plan.placement.device == device].sum()) for device in range(plan.devices))
    return max(1, 2 * kinds * plan.chunks * plan.microbatches // max(3 * most, 1))


Unit = tuple[int, int]  # stage and microbatch
Ticks = tuple[np.ndarray, np.ndarray, np.ndarray]  # int [stages, microbatches] of F, B, W


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """When the parts of a device's activations leave and come: {unit: ticks in order}."""

    out: dict[Unit, list[int]]
    back: dict[Unit, list[int]]


# How long an activation may wait for its turn to leave or to come, in the time that a transfer takes. With little
# patience more stays on the device, with much a crowd of them holds its places longer.
_PATIENCE = (1, 2, 4, 16)


def _best_transfers(table: Table, device: int, units: list[Unit], at: Ticks, parts: int) -> _Transfers:
    """The transfers for which the device needs the fewest slots."""

    def slots(transfers: _Transfers) -> int:
        spans = _moving_spans(table, device, at, transfers)
        return assign_slots((span.start, span.end) for span in spans)[1]

    f, b, _ = at
    ticks = table.columns["f_valid"].shape[1]
    return min((_plan(units, f, b, parts, ticks, parts * patience) for patience in _PATIENCE), key=slots)


def _plan(units: list[Unit], f: np.ndarray, b: np.ndarray, parts: int, ticks: int, patience: int) -> _Transfers:
    """Each part out at the earliest free tick after F, and back at the latest before B (paper, section 4).

    What would have to come back before all of it has left stays on the device, and leaves its place to others.
    """
    while True:
        out = _earliest(sorted(units, key=lambda unit: f[unit]), f, parts, patience)
        mirrored = _earliest(sorted(out, key=lambda unit: -b[unit]), ticks - 1 - b, parts, patience)
        back = {unit: [ticks - 1 - tick for tick in reversed(times)] for unit, times in mirrored.items()}
        late = [unit for unit in back if back[unit][0] <= out[unit][-1]]
        if not late:
            return _Transfers({unit: out[unit] for unit in back}, back)
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


def _residuals(table: Table, device: int, f: np.ndarray, b: np.ndarray, w: np.ndarray) -> int:
    """Residuals that stay live from F to W."""
    return table.allocate(
        device,
        [
            Span(
                Moment.FORWARD.of(f[unit]),
                Moment.WEIGHTS.of(w[unit]),
                (("f_store", int(f[unit])), ("b_load", int(b[unit])), ("w_load", int(w[unit]))),
            )
            for unit in table.passes_on(device)
        ],
    )


def _moving_spans(table: Table, device: int, at: Ticks, transfers: _Transfers) -> list[Span]:
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


def _moving(table: Table, device: int, at: Ticks, transfers: _Transfers) -> int:
    for ticks, names in ((transfers.out, ("out_part",)), (transfers.back, ("in_part", "in_valid"))):
        for unit in ticks:
            for part, tick in enumerate(ticks[unit]):
                for name in names:
                    table.columns[name][device, tick] = part if name.endswith("part") else 1
    return table.allocate(device, _moving_spans(table, device, at, transfers))


def _stash(table: Table, device: int, b: np.ndarray, w: np.ndarray) -> int:
    """What B hands to W lives from the one to the other."""
    return table.allocate(
        device,
        [
            Span.between(("stash_store", b[unit], Moment.BACKWARD), ("w_stash", w[unit], Moment.WEIGHTS))
            for unit in table.passes_on(device)
        ],
    )


def _host(table: Table, device: int, transfers: _Transfers) -> int:
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
