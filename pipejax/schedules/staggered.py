"""GPipe, 1F1B and interleaved 1F1B with one pass at a time on each device, backward not split.

A device's order is given by counting: F's are numbered as they come (groups of microbatches, chunk after chunk), B's
likewise with the chunks reversed, and B number y follows F number y + w, w the device's warm-up.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.blocks import Chunked, from_slots, refuse_transfer_ticks
from pipejax.schedules.schedule import Kind, Schedule, check_size, looping
from pipejax.schedules.simulate import compact


@dataclasses.dataclass(frozen=True)
class StaggeredGPipe(Chunked):
    """All forwards, then all backwards (arXiv 1811.06965), interleaved where `chunks` is above 1."""

    chunks: int = 1

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        refuse_transfer_ticks("gpipe", transfer_ticks)
        return alternating("gpipe", devices, self.chunks, microbatches, forwards_first=True)


@dataclasses.dataclass(frozen=True)
class StaggeredOneFOneB:
    """One forward, one backward (PipeDream-flush, DAPPLE: arXiv 2006.09503, 2007.01045); p - i in flight on rank i."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        refuse_transfer_ticks("1f1b", transfer_ticks)
        return alternating("1f1b", devices, 1, microbatches)


@dataclasses.dataclass(frozen=True)
class StaggeredInterleaved(Chunked):
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473); peak v p + p - 1 chunk-activations."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        refuse_transfer_ticks("interleaved", transfer_ticks)
        return alternating("interleaved", devices, self.chunks, microbatches)


def alternating(
    name: str,
    devices: int,
    chunks: int,
    microbatches: int,
    *,
    slices: int = 1,
    forwards_first: bool = False,
) -> Schedule:
    """Warm-up, one F and one B in turns, cool-down; units of work are slices of microbatches.

    Args:
      name: the schedule's name.
      devices: p.
      chunks: v.
      microbatches: m.
      slices: slices of each microbatch.
      forwards_first: whether the warm-up takes all F's.
    """
    check_size(name, devices, microbatches)
    forward, group = _numbers(devices, chunks, microbatches, slices)
    # B's of a microbatch take its slices in reverse, as its chunks.
    mirrored = forward.reshape(chunks, microbatches, slices)[::-1, :, ::-1].reshape(chunks, -1)
    placement = looping(devices, chunks)
    rank, chunk = placement.device, placement.chunk
    # With several chunks an F must get from the ring's end to its start while B's come the other way: twice the skew.
    skew = (devices - 1 - rank) * (2 if chunks > 1 else 1)
    warm_up = skew + (chunks - 1) * group * slices + slices - 1
    if forwards_first:
        warm_up = np.full_like(warm_up, forward.size)
    # Slots only give the order: F number x at 2 x, B number y right after F number y + warm-up.
    slots = {Kind.F: 2 * forward[chunk], Kind.B: 2 * (mirrored[chunk] + warm_up[:, None]) + 1}
    return compact(from_slots(name, placement, slots, devices=devices, microbatches=microbatches, slices=slices))


def _numbers(devices: int, chunks: int, microbatches: int, slices: int) -> tuple[np.ndarray, int]:
    """int64 [chunks, units], the number of each F in the order that all devices share, and the largest group.

    Groups hold enough units to go around the ring once and are of nearly equal size; a group runs chunk after chunk.
    """
    around = -(-devices // slices)  # microbatches
    groups = np.array_split(np.arange(microbatches), max(microbatches // around, 1))
    number = np.zeros((chunks, microbatches, slices), np.int64)
    base = 0
    for group in groups:
        count = len(group) * slices
        inner = base + np.arange(count).reshape(len(group), slices)
        number[:, group] = inner + count * np.arange(chunks)[:, None, None]
        base += count * chunks
    return number.reshape(chunks, -1), max(len(group) for group in groups)
