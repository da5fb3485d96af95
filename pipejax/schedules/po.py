"""PO, PO-H and PO-F: microbatches one by one, so that activations offload well (PipeOffload, arXiv 2503.01328).

The next microbatch starts every 3 v slots, whatever the chunk: all activations of a chunk live equally long, and each
chunk adds to the peak in proportion to its lifespan. Offloading the longest-lived chunks then takes more from the peak
than their share.
"""

from __future__ import annotations

import dataclasses
import math

from pipejax.schedules.blocks import Chunked
from pipejax.schedules.gis import grouped
from pipejax.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PO(Chunked):
    """The uniform schedule, nothing offloaded."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return grouped("po", devices, self.chunks, microbatches, 1, transfer_ticks)


@dataclasses.dataclass(frozen=True)
class POH(Chunked):
    """PO with the longer-lived half of the chunks in host memory: for k up to 2."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        schedule = grouped("po-h", devices, self.chunks, microbatches, 1, transfer_ticks)
        return dataclasses.replace(schedule, offload_chunks=math.ceil(self.chunks / 2))


@dataclasses.dataclass(frozen=True)
class POF(Chunked):
    """PO with all chunks in host memory: for k up to 1."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        schedule = grouped("po-f", devices, self.chunks, microbatches, 1, transfer_ticks)
        return dataclasses.replace(schedule, offload_chunks=self.chunks)
