"""What each device does at each tick, as integer tables that the runtime scans over. NumPy only.

Made from a schedule by `pipejax.program_lockstep` or `pipejax.program_staggered`, which say what a tick is; slots of
all buffers are given by liveness, per device (`pipejax.program_table`).
"""

from __future__ import annotations

import dataclasses

from pipejax.schedules.schedule import IntArray, Schedule

COLUMNS = (
    "f_valid",  # 1 where the device runs an F
    "f_chunk",
    "f_microbatch",
    "f_embed",  # 1 where F is of the first stage: its input is embedded, not received
    "f_head",  # 1 where F is of the last stage: the head follows
    "f_source",  # forward arrival slot of F's input
    "f_store",  # residual slot (device ring) that F fills
    "head_store",  # backward arrival slot for the head's cotangent
    "b_valid",
    "b_chunk",
    "b_microbatch",
    "b_embed",  # 1 where B is of the first stage: the embedding's backward follows
    "b_source",  # backward arrival slot of B's cotangent
    "b_load",  # residual slot that B takes
    # Arrival slots for what comes at the end of the tick: from the device before, from the one after, or from itself.
    "f_from_before",
    "f_from_after",
    "f_from_itself",
    "b_from_before",
    "b_from_after",
    "b_from_itself",
    # The same on every device, for parts whose parameters are cut over the devices, so that all take part:
    "embed_due",  # 1 where any device's F embeds its input
    "embed_microbatch",
    "head_due",  # 1 where any device's F is followed by the head
    "head_microbatch",
    "unembed_due",  # 1 where any device's B is followed by the embedding's backward
    "unembed_microbatch",
    # Lockstep, where all residuals move: slots of the host ring.
    "host_write",  # for the residuals of this tick's F
    "host_load",  # of the residuals of this tick's B
    "host_next",  # of the next tick's B
    # Staggered, and lockstep where only some residuals move.
    "stash_store",  # slot for what this tick's B hands to its W
    "w_valid",
    "w_chunk",
    "w_microbatch",
    "w_load",  # residual slot that W takes
    "w_stash",  # slot of what its B handed over
    "f_move",  # slots of the residuals that spend time on the host, in a device ring of their own
    "b_move",
    "w_move",
    "out_load",  # slot of these of which a part goes to the host in this tick,
    "out_part",
    "out_store",  # and the host ring slot that it goes to
    "in_valid",  # 1 where a part comes from the host in this tick,
    "in_load",  # the host ring slot that it comes from,
    "in_part",
    "in_store",  # and the slot that it goes to
)

# Whence something arrives: the way of a send, by the difference of device numbers.
WAYS = {1: "before", -1: "after", 0: "itself"}


class ProgramError(ValueError):
    """A schedule that the runtime cannot run, or a program whose slots clash."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A run of ticks whose bodies are alike, scanned by one compiled loop.

    Attributes:
      start, stop: first tick, and one past the last.
      forward, backward: what the ticks run.
      flush: in lockstep, whether a phase without B has left its last residuals to be written before this one.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    flush: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What each device does at each tick, as data.

    Attributes:
      schedule: where it comes from.
      table: int32 [devices, ticks, len(COLUMNS)].
      phases: the scans, in order.
      layers: positions in a chunk.
      predicated: whether devices do different kinds of work in a tick, so that each pass stands under a predicate.
      forward_ways, backward_ways: the ways, among `WAYS`, that anything is sent.
      forward_arrivals, backward_arrivals, residual_slots, stash_slots, moving_slots, host_slots: how many slots each
        buffer has.
      offload: whether residuals pass through the host ring.
      parts: into how many parts a slot is cut for its transfers, one each way in a tick; 0 in lockstep where all
        residuals move, whole layers at a time.
    """

    schedule: Schedule
    table: IntArray
    phases: tuple[Phase, ...]
    layers: int
    predicated: bool
    forward_ways: tuple[int, ...]
    backward_ways: tuple[int, ...]
    forward_arrivals: int
    backward_arrivals: int
    residual_slots: int = 0
    stash_slots: int = 0
    moving_slots: int = 0
    host_slots: int = 0
    offload: bool = False
    parts: int = 0

    def column(self, name: str) -> IntArray:
        """int32 [devices, ticks], one column of the table."""
        return self.table[:, :, COLUMNS.index(name)]
