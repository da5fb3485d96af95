"""Zero-bubble schedules with one chunk on each device: ZB-H1 and ZB-H2 (arXiv 2401.10241).

W needs nothing from other devices, so it fills the waits that B's leave.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.blocks import from_slots, refuse_transfer_ticks
from pipejax.schedules.costs import UNIT, Costs
from pipejax.schedules.greedy import greedy
from pipejax.schedules.schedule import Kind, Schedule, check_size, looping
from pipejax.schedules.simulate import compact


@dataclasses.dataclass(frozen=True)
class ZBH1:
    """1F1B's warm-up and memory, a third of its bubble: (p - 1)(T_F + T_B - T_W)."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        check_size("zb-h1", devices, microbatches)
        refuse_transfer_ticks("zb-h1", transfer_ticks)
        placement = looping(devices, 1)
        rank, index = placement.device[:, None].astype(np.int64), np.arange(microbatches)
        # Rank i keeps p - i microbatches between F and B and i between B and W: p on each.
        forward = np.broadcast_to(3 * index, (devices, microbatches))
        slots = {
            Kind.F: forward,
            Kind.B: 3 * (index + devices - 1 - rank) + 1,
            Kind.W: np.broadcast_to(3 * (index + devices - 1) + 2, forward.shape),
        }
        return compact(from_slots("zb-h1", placement, slots, devices=devices, microbatches=microbatches))


@dataclasses.dataclass(frozen=True)
class ZBH2:
    """No device waits between its first and its last pass, for up to 2 p - 1 microbatches in memory.

    Attributes:
      costs: the times of passes that the order is made for.
    """

    costs: Costs = UNIT

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        check_size("zb-h2", devices, microbatches)
        refuse_transfer_ticks("zb-h2", transfer_ticks)
        return greedy(
            "zb-h2",
            looping(devices, 1),
            devices=devices,
            microbatches=microbatches,
            limits=[2 * devices - 1] * devices,
            split_backward=True,
            costs=self.costs,
        )
