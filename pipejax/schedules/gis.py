"""Grouped interleaved schedules with B and W split: GIS, any group size, GIS-H (PipeOffload, arXiv 2503.01328).

All passes take one slot of a grid in which rank i runs F in slots congruent to i mod 3, B to i + 1, W to i + 2. Groups
of g microbatches run their chunks one after another; the smaller the group, the sooner an activation is used, and the
longer the warm-up.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pipejax.schedules.blocks import Chunked, from_slots, refuse_transfer_ticks
from pipejax.schedules.schedule import Kind, Schedule, check_size, looping
from pipejax.schedules.simulate import compact


@dataclasses.dataclass(frozen=True)
class GIS(Chunked):
    """Grouped interleaved schedule: peak g (v - 1) + p - i chunk-activations on rank i for g >= ceil(p / 2).

    Attributes:
      group: g, microbatches that run a chunk before the next chunk's turn; None for as many as devices.
    """

    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None and self.group < 1:
            raise ValueError(f"GIS: group is {self.group}; a group has one microbatch or more.")

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        group = devices if self.group is None else self.group
        if group > max(devices, 1):
            raise ValueError(f"GIS: group is {group} on {devices} devices; more than one of each device gains nothing.")
        return grouped("gis", devices, self.chunks, microbatches, group, transfer_ticks)


@dataclasses.dataclass(frozen=True)
class GISH(Chunked):
    """GIS with groups of half the devices: about half of its activations for a longer bubble."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return grouped("gis-h", devices, self.chunks, microbatches, math.ceil(devices / 2), transfer_ticks)


def grouped(name: str, devices: int, chunks: int, microbatches: int, group: int, transfer_ticks: int) -> Schedule:
    """The building block of one group, repeated every 3 g v slots, then each device's order run as soon as possible."""
    check_size(name, devices, microbatches)
    refuse_transfer_ticks(name, transfer_ticks)
    # A chunk follows the one before after `wait` groups, the time to go around the ring. Where that is no whole number
    # of rounds of chunks, one more group after every `chunks / turns` chunks keeps two from one slot.
    wait = math.ceil(math.ceil(devices / 2) / group)
    turns = math.gcd(chunks, wait)
    chunk = np.arange(chunks)
    hop = 3 * wait * group * chunk + 3 * group * (chunk // (chunks // turns))
    microbatch = np.arange(microbatches)
    base = 3 * group * chunks * (microbatch // group) + 3 * (microbatch % group)
    placement = looping(devices, chunks)
    rank, stage_chunk = placement.device[:, None].astype(np.int64), placement.chunk
    forward = hop[stage_chunk][:, None] + base + rank
    first = hop[-1] + rank + 3 * (devices - 1 - rank) + 1
    backward = first + hop[chunks - 1 - stage_chunk][:, None] + base
    slots = {Kind.F: forward, Kind.B: backward, Kind.W: backward + 1}
    return compact(from_slots(name, placement, slots, devices=devices, microbatches=microbatches))
