"""Slices of the sequence as the unit of work: Seq1F1B (arXiv 2406.03488) and TeraPipe (arXiv 2102.07988).

F takes the slices of a microbatch in order, since a slice attends to those before it, and B in reverse. A slice holds
its share of a microbatch's activations, so the peak falls as slices become smaller.
"""

from __future__ import annotations

import dataclasses

from pipejax.schedules.blocks import refuse_transfer_ticks
from pipejax.schedules.schedule import Schedule, check_chunks
from pipejax.schedules.staggered import alternating


@dataclasses.dataclass(frozen=True)
class Seq1F1B:
    """1F1B over slices, interleaved where `chunks` is above 1.

    Attributes:
      chunks: v, chunks on each device.
      slices: slices of each microbatch's sequence.
    """

    chunks: int = 1
    slices: int = 4

    def __post_init__(self) -> None:
        check_chunks(self.chunks)
        _check_slices(self.slices)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        refuse_transfer_ticks("seq1f1b", transfer_ticks)
        return alternating("seq1f1b", devices, self.chunks, microbatches, slices=self.slices)


@dataclasses.dataclass(frozen=True)
class TeraPipe:
    """GPipe over slices: all forwards, then all backwards.

    Attributes:
      slices: slices of each microbatch's sequence.
    """

    slices: int = 4

    def __post_init__(self) -> None:
        _check_slices(self.slices)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        refuse_transfer_ticks("terapipe", transfer_ticks)
        return alternating("terapipe", devices, 1, microbatches, slices=self.slices, forwards_first=True)


def _check_slices(slices: int) -> None:
    if slices < 1:
        raise ValueError(f"slices is {slices}; a microbatch has one slice or more.")
