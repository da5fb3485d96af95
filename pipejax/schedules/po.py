"""PO, PO-H and PO-F: microbatches one by one, so that activations offload well (PipeOffload, arXiv 2503.01328).

The next microbatch starts every 3 v slots, whatever the chunk: all activations of a chunk live equally long, and each
chunk adds to the peak in proportion to its lifespan. Offloading the longest-lived chunks then takes more from the peak
than their share.
"""

from __future__ import annotations

import dataclasses
import math

from pipejax.schedules.gis import grouped
from pipejax.schedules.schedule import Schedule, check_chunks


@dataclasses.dataclass(frozen=True)
class PO:
    """The uniform schedule, nothing offloaded.

    Attributes:
      chunks: v, chunks on each device.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return grouped("po", devices, self.chunks, microbatches, 1, transfer_ticks)


@dataclasses.dataclass(frozen=True)
class POH:
    """PO with the longer-lived half of the chunks in host memory: for k up to 2.

    Attributes:
      chunks: v, chunks on each device.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        schedule = grouped("po-h", devices, self.chunks, microbatches, 1, transfer_ticks)
        return dataclasses.replace(schedule, offload_chunks=math.ceil(self.chunks / 2))


@dataclasses.dataclass(frozen=True)
class POF:
    """PO with all chunks in host memory: for k up to 1.

    Attributes:
      chunks: v, chunks on each device.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        schedule = grouped("po-f", devices, self.chunks, microbatches, 1, transfer_ticks)
        return dataclasses.replace(schedule, offload_chunks=self.chunks)
