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

import numpy as np

from pipejax import program_transfers
from pipejax.program import Phase, Program, ProgramError
from pipejax.program_table import Moment, Span, Table, ticks_of
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
    parts = moving = host = 0
    if wanted is not None:
        passes = 3 if plan.split_backward else 2
        parts = program_transfers.parts_of(wanted, plan, passes, k)
        never = np.zeros((plan.devices, plan.slots), bool)
        moving, host = program_transfers.place(table, (f, b, w), wanted, parts, never)
    residuals = stash = 0
    for device in range(plan.devices):
        residuals = max(residuals, _residuals(table, device, f, b, w))
        stash = max(stash, _stash(table, device, b, w))
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


def _stash(table: Table, device: int, b: np.ndarray, w: np.ndarray) -> int:
    """What B hands to W lives from the one to the other."""
    return table.allocate(
        device,
        [
            Span.between(("stash_store", b[unit], Moment.BACKWARD), ("w_stash", w[unit], Moment.WEIGHTS))
            for unit in table.passes_on(device)
        ],
    )
