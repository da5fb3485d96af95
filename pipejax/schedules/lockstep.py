"""Lockstep schedules: in a tick all devices run the same kinds of pass, an F and a B (DESIGN section 3).

F of chunk c on device d for microbatch i runs at tick d + n(c, i), its B at tick O + (p - 1 - d) + n(v - 1 - c, i). In
a tick F comes before B, and what is sent in one tick can be used in the next. A step takes m v + p - 1 ticks of F and
as many of B, whatever the offset O is; O costs only residual slots, so it is the smallest that leaves every B after
its F.

Where W is split off it runs in the same tick on all devices, that of device 0's B, so that only m v ticks run a W.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.schedule import PASS_DTYPE, Kind, Schedule, check_chunks, check_size, looping, sort_passes


@dataclasses.dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards (arXiv 1811.06965), interleaved where `chunks` is above 1.

    Attributes:
      chunks: v, chunks on each device.
      split_weights: whether W is a pass of its own, aligned across devices.
    """

    chunks: int = 1
    split_weights: bool = False

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _lockstep(
            "lockstep-gpipe",
            devices,
            self.chunks,
            microbatches,
            transfer_ticks,
            split_weights=self.split_weights,
            all_forwards_first=True,
        )


@dataclasses.dataclass(frozen=True)
class OneFOneB:
    """One forward, one backward (PipeDream-flush, DAPPLE: arXiv 2006.09503, 2007.01045); one chunk on each device.

    Attributes:
      split_weights: whether W is a pass of its own, aligned across devices.
    """

    split_weights: bool = False

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _lockstep("lockstep-1f1b", devices, 1, microbatches, transfer_ticks, split_weights=self.split_weights)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473) for any number of microbatches.

    Attributes:
      chunks: v, chunks on each device.
      split_weights: whether W is a pass of its own, aligned across devices.
    """

    chunks: int = 2
    split_weights: bool = False

    def __post_init__(self) -> None:
        check_chunks(self.chunks)

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _lockstep(
            "lockstep-interleaved",
            devices,
            self.chunks,
            microbatches,
            transfer_ticks,
            split_weights=self.split_weights,
        )


def forward_offsets(devices: int, chunks: int, microbatches: int) -> tuple[np.ndarray, int]:
    """n(c, i) of DESIGN section 3, and the longest stride between a microbatch's chunks.

    Microbatches are cut into floor(m / p) groups of nearly equal size g >= p; a group runs its chunks one after
    another, chunk c of its j-th microbatch at base + c g + j. Fewer microbatches than devices are one group of stride
    p, with holes.

    Returns:
      int64 [chunks, microbatches], and max(g).
    """
    groups = max(microbatches // devices, 1)
    sizes = [microbatches // groups + (index < microbatches % groups) for index in range(groups)]
    offsets = np.zeros((chunks, microbatches), np.int64)
    base = first = 0
    for size in sizes:
        stride = max(size, devices)
        offsets[:, first : first + size] = base + stride * np.arange(chunks)[:, None] + np.arange(size)
        base, first = base + stride * chunks, first + size
    return offsets, max(max(sizes), devices)


def _lockstep(
    name: str,
    devices: int,
    chunks: int,
    microbatches: int,
    transfer_ticks: int,
    *,
    split_weights: bool,
    all_forwards_first: bool = False,
) -> Schedule:
    check_size(name, devices, microbatches)
    if transfer_ticks < 0:
        raise ValueError(f"{name}: transfer_ticks is {transfer_ticks}; pass 0 or more ticks.")
    offsets, stride = forward_offsets(devices, chunks, microbatches)
    start = (chunks - 1) * stride + devices - 1 + transfer_ticks
    if all_forwards_first:
        # Residuals wait for the last F of any device, so no tick runs both.
        start = max(start, int(offsets.max()) + devices)
    device, chunk, microbatch = (
        axis.reshape(-1) for axis in np.indices((devices, chunks, microbatches), dtype=np.int64)
    )
    slots = {
        Kind.F: device + offsets[chunk, microbatch],
        Kind.B: start + devices - 1 - device + offsets[chunks - 1 - chunk, microbatch],
    }
    if split_weights:
        slots[Kind.W] = start + devices - 1 + offsets[chunks - 1 - chunk, microbatch]
    passes = np.zeros((len(slots), device.size), PASS_DTYPE)
    for row, (kind, slot) in zip(passes, slots.items(), strict=True):
        row["kind"] = kind
        for column, values in (("device", device), ("slot", slot), ("chunk", chunk), ("microbatch", microbatch)):
            row[column] = values
    return Schedule(
        name=name,
        devices=devices,
        chunks=chunks,
        microbatches=microbatches,
        passes=sort_passes(passes.reshape(-1)),
        placement=looping(devices, chunks),
        split_backward=split_weights,
        lockstep=True,
    )
