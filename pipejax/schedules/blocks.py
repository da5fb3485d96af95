"""From the slots that a construction gives its passes to a schedule. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from pipejax.schedules.schedule import PASS_DTYPE, Kind, Placement, Schedule, check_chunks, sort_passes


@dataclasses.dataclass(frozen=True)
class Chunked:
    """What schedules with any number of chunks have in common.

    Attributes:
      chunks: v, chunks on each device.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        check_chunks(self.chunks)


def from_slots(
    name: str,
    placement: Placement,
    slots: Mapping[Kind, np.ndarray],
    *,
    devices: int,
    microbatches: int,
    slices: int = 1,
    lockstep: bool = False,
) -> Schedule:
    """A schedule whose passes run in the slots given.

    Args:
      name: the schedule's name.
      placement: where each stage lives.
      slots: for F, B and, where the backward is split, W: int [stages, microbatches * slices].
      devices: p.
      microbatches: m.
      slices: slices of each microbatch.
      lockstep: whether slots are ticks.
    """
    stages, units = slots[Kind.F].shape
    passes = np.zeros((len(slots), stages, units), PASS_DTYPE)
    for table, (kind, slot) in zip(passes, slots.items(), strict=True):
        table["kind"] = kind
        table["slot"] = slot
        table["device"], table["chunk"] = placement.device[:, None], placement.chunk[:, None]
        table["microbatch"], table["slice"] = np.divmod(np.arange(units), slices)
    return Schedule(
        name=name,
        devices=devices,
        chunks=stages // devices,
        microbatches=microbatches,
        passes=sort_passes(passes.reshape(-1)),
        placement=placement,
        split_backward=Kind.W in slots,
        lockstep=lockstep,
        slices=slices,
    )


def refuse_transfer_ticks(name: str, transfer_ticks: int) -> None:
    """Only lockstep schedules keep ticks free for transfers; others place them with `transfers.plan`."""
    if transfer_ticks:
        raise ValueError(
            f"schedule {name!r} has no ticks to keep free for transfers; build it with transfer_ticks=0 and add them "
            "with transfers.plan."
        )
