"""Waves: each chunk runs over the devices the other way round than the one before (Hanayo, arXiv 2308.15762)."""

from __future__ import annotations

import dataclasses

from pipejax.schedules.blocks import refuse_transfer_ticks
from pipejax.schedules.costs import UNIT, Costs
from pipejax.schedules.greedy import greedy
from pipejax.schedules.schedule import Schedule, check_chunks, check_size, wave
from pipejax.schedules.simulate import simulate

_FEW = 4  # microbatches for each device, up to which F's far from the loss may be the most urgent


@dataclasses.dataclass(frozen=True)
class Wave:
    """Hanayo's waves by list scheduling, within the memory of interleaved 1F1B.

    A wave turns on the device it is on, so hand-overs at the turns need no communication.

    Attributes:
      chunks: v, chunks on each device; v / 2 waves.
      costs: the times of passes that the order is made for.
    """

    chunks: int = 4
    costs: Costs = UNIT

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        check_size("wave", devices, microbatches)
        refuse_transfer_ticks("wave", transfer_ticks)
        placement = wave(devices, self.chunks)
        # What is most urgent differs with size: microbatches in groups or in one stream, the F nearest to the loss or
        # the farthest. The farthest first only pays with few microbatches, and gets worse with each one more.
        few = microbatches <= _FEW * devices
        ways = [(group, True) for group in (devices, 2 * devices, None)]
        ways += [(group, False) for group in (devices, None)] if few else []
        candidates = [
            greedy(
                "wave",
                placement,
                devices=devices,
                microbatches=microbatches,
                limits=[(self.chunks + 1) * devices] * devices,  # as interleaved 1F1B
                split_backward=False,
                costs=self.costs,
                deep_first=deep_first,
                group=group,
            )
            for group, deep_first in ways
        ]
        return min(candidates, key=lambda schedule: simulate(schedule, self.costs).makespan)
